"""The ranks' output: written to the terminal, each line prefixed with the ranks that wrote it, and to files."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from choros.errors import ConfigError
from choros.launch.driver.line_merger import LineMerger, Lines
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.frames import Text

__all__ = ["DescriptorSink", "Files", "Output", "Screen", "Sink", "use_colour"]

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CLEAR_TO_END = b"\x1b[K"


class Sink(Protocol):
    """The stream that the screen writes to."""

    def write(self, data: bytes, /) -> object:
        """Writes all of ``data``; raises an ``OSError`` if that is not possible."""


class DescriptorSink:
    """Writes to a file descriptor, without a buffer: what cannot be written is known at once."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, data: bytes, /) -> None:
        """See ``Sink``."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:  # a terminal that another program has set to non-blocking mode
                select.select([], [self.descriptor], [])


class _Discard:
    def write(self, data: bytes, /) -> None:
        pass


def use_colour(environ: Mapping[str, str], terminal: bool) -> bool:
    """Returns whether to colour output to a ``terminal``: https://no-color.org."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Screen:
    """Writes the ranks' output to this process's standard output and error.

    Lines of different ranks are never mixed: when another rank writes after a partial line, the partial line is
    ended first.

    Args:
        out: standard output.
        err: standard error.
        prefix: begin every line with the ranks that wrote it.
        colour: show these in colours.
        roles: the ranks' roles.
        timestamp: begin every line with the date and time at which it is shown.
    """

    def __init__(
        self,
        out: Sink,
        err: Sink,
        *,
        prefix: bool,
        colour: bool,
        roles: Roles = NO_ROLES,
        timestamp: bool = False,
    ) -> None:
        self._streams: dict[str, Sink] = {"out": out, "err": err}
        self._prefix = prefix
        self._timestamp = timestamp
        self._colour = colour
        self._roles = roles
        self._open: tuple[tuple[int, ...], str] | None = None

    def write(self, lines: Lines) -> None:
        """Writes lines, or a partial line."""
        writer, data = (lines.ranks, lines.stream), lines.data
        if not self._prefix and not self._timestamp:
            if self._open not in (None, writer):
                self.finish_line()
            self._write(lines.stream, data)
            self._open = None if data.endswith(b"\n") else writer
            return
        label = self._label(lines.ranks)
        if b"\r" in data:  # searching for two bytes takes many times as long as for one
            data = data.replace(b"\r\n", b"\n").replace(b"\n\r", b"\n")
        if self._open != writer:
            data = data.lstrip(b"\r")  # these ranks have written nothing to the line
            if not data:
                return
            self.finish_line()
            data = label + data
        body, end = (data[:-1], data[-1:]) if data.endswith((b"\n", b"\r")) else (data, b"")
        body = body.replace(b"\r", b"\r" + label).replace(b"\n", b"\n" + label) + end
        if self._colour:
            body = body.replace(b"\r", _CLEAR_TO_END + b"\r")
        self._write(lines.stream, body)
        self._open = None if end else writer

    def finish_line(self) -> None:
        """Ends the partial line, if there is one."""
        if self._open is not None:
            self._write(self._open[1], b"\n")
            self._open = None

    def show(self, text: str) -> None:
        """Shows a message of chorosrun itself, without the date and time."""
        self.finish_line()
        self._write("err", text.encode("utf-8", "surrogateescape") + b"\n")

    def _write(self, name: str, data: bytes) -> None:
        """Writes to a stream. If that is not possible any more, the job continues without it."""
        try:
            self._streams[name].write(data)
        except OSError as error:
            self._streams[name] = _Discard()
            if not isinstance(error, BrokenPipeError) and name == "out":  # "| head" is no error
                self.show(
                    f"chorosrun: standard output cannot be written ({error.strerror}); the job continues without it."
                )

    def _label(self, ranks: tuple[int, ...]) -> bytes:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamp else b""
        label = f"[{self._roles.label(*ranks)}] ".encode() if self._prefix else b""
        if not self._colour or not label or len(ranks) > 1:
            return stamp + label
        return b"%s\x1b[%dm%s\x1b[0m" % (stamp, _COLOURS[ranks[0] % len(_COLOURS)], label)


class Files:
    """Writes each rank's output to ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``, or ``DIR/worker.N/…``.

    Raises:
        ConfigError: they cannot be created.
    """

    def __init__(self, directory: Path, size: int, roles: Roles = NO_ROLES) -> None:
        self._files: dict[tuple[int, str], DescriptorSink] = {}
        for rank in range(size):
            for stream in ("out", "err"):
                path = directory / roles.directory(rank) / f"std{stream}"
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
                except OSError as error:
                    self.close()
                    raise ConfigError(
                        f"--output-dir {directory}: {path} cannot be created: {error.strerror}."
                    ) from error
                self._files[rank, stream] = DescriptorSink(file)

    def write(self, frame: Text) -> None:
        """Appends lines, or a partial line, as the rank wrote them; raises an ``OSError`` if there is no room."""
        self._files[frame.rank, frame.stream].write(frame.data)

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()


class Output:
    """The screen, and the output files if ``--output-dir`` is given.

    Args:
        screen: the screen.
        files: the files, which have all lines of each rank.
        merger: merges equal lines of several ranks on the screen.
    """

    def __init__(self, screen: Screen, files: Files | None = None, merger: LineMerger | None = None) -> None:
        self._screen = screen
        self._files = files
        self._merger = merger

    def write(self, text: Text) -> None:
        """Writes a rank's output to its files, and to the screen, where lines may be held: see ``due_after``."""
        if self._merger is None:
            self._screen.write(Lines((text.rank,), text.stream, text.data))
        else:
            self._write(self._merger.add(text, time.monotonic()))
        self._write_to_file(text)

    def write_due(self) -> None:
        """Writes the held lines that are due to the screen."""
        if self._merger is not None:
            self._write(self._merger.due(time.monotonic()))

    def due_after(self) -> float | None:
        """Returns the seconds after which held lines are due; ``None`` if there are none."""
        return None if self._merger is None else self._merger.wait(time.monotonic())

    def flush(self) -> None:
        """Writes all held lines to the screen."""
        if self._merger is not None:
            self._write(self._merger.flush())

    def write_to_file(self, rank: int, text: str) -> None:
        """Writes a rank's final traceback to its file only: the screen shows it with the job's outcome."""
        if text:
            self._write_to_file(Text(rank, "err", text.encode("utf-8", "surrogateescape") + b"\n"))

    def show(self, text: str) -> None:
        """Shows a message of chorosrun itself, after all that the ranks have written."""
        self.flush()
        self._screen.show(text)

    def finish(self) -> None:
        """Writes all held lines and ends the partial line on the screen: no rank writes any more."""
        self.flush()
        self._screen.finish_line()

    def close(self) -> None:
        """Finishes the output and closes the files."""
        self.finish()
        if self._files is not None:
            self._files.close()

    def _write(self, lines: Iterable[Lines]) -> None:
        for each in lines:
            self._screen.write(each)

    def _write_to_file(self, text: Text) -> None:
        try:
            if self._files is not None:
                self._files.write(text)
        except OSError as error:
            self._files = None
            self.show(
                f"chorosrun: --output-dir: a file cannot be written ({error.strerror}). From here on, the output of "
                "the ranks is not written to files."
            )
