"""The ranks' output: written to the terminal, each line prefixed with its rank, and to files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.frames import Text

__all__ = ["Files", "Output", "Screen", "Sink", "use_colour"]

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CLEAR_TO_END = b"\x1b[K"


class Sink(Protocol):
    """The stream that the screen writes to, in most cases a binary file."""

    def write(self, data: bytes, /) -> object:
        """Writes bytes."""

    def flush(self) -> None:
        """Flushes written bytes."""

    def fileno(self) -> int:
        """Returns the stream's file descriptor."""


def use_colour(environ: Mapping[str, str], terminal: bool) -> bool:
    """Returns whether to colour output to a ``terminal``: https://no-color.org."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Screen:
    """Writes the ranks' output to this process's standard output and error.

    Lines of different ranks are never mixed: when another rank writes after a partial line, the partial line is
    ended first.
    """

    def __init__(self, out: Sink, err: Sink, *, prefix: bool, colour: bool, roles: Roles = NO_ROLES) -> None:
        self._streams = {"out": out, "err": err}
        self._prefix = prefix
        self._colour = colour
        self._roles = roles
        self._open: tuple[int, str] | None = None

    def write(self, frame: Text) -> None:
        """Writes lines, or a partial line."""
        writer, data = (frame.rank, frame.stream), frame.data
        stream = self._streams[frame.stream]
        if not self._prefix:
            if self._open not in (None, writer):
                self.finish_line()
            _write(stream, data)
            self._open = None if data.endswith(b"\n") else writer
            return
        label = self._label(frame.rank)
        data = data.replace(b"\r\n", b"\n").replace(b"\n\r", b"\n")
        if self._open != writer:
            data = data.lstrip(b"\r")  # this rank has written nothing to the line
            if not data:
                return
            self.finish_line()
            data = label + data
        body, end = (data[:-1], data[-1:]) if data.endswith((b"\n", b"\r")) else (data, b"")
        body = body.replace(b"\r", b"\r" + label).replace(b"\n", b"\n" + label) + end
        if self._colour:
            body = body.replace(b"\r", _CLEAR_TO_END + b"\r")
        _write(stream, body)
        self._open = None if end else writer

    def finish_line(self) -> None:
        """Ends the partial line, if there is one."""
        if self._open is not None:
            _write(self._streams[self._open[1]], b"\n")
            self._open = None

    def show(self, text: str) -> None:
        """Shows a message of chorosrun itself."""
        self.finish_line()
        _write(self._streams["err"], text.encode("utf-8", "surrogateescape") + b"\n")

    def _label(self, rank: int) -> bytes:
        label = f"[{self._roles.label(rank)}] ".encode()
        if not self._colour:
            return label
        return b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], label)


class Files:
    """Writes each rank's output to ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``, or ``DIR/worker.N/…``."""

    def __init__(self, directory: Path, roles: Roles = NO_ROLES) -> None:
        self._directory = directory
        self._roles = roles
        self._files: dict[tuple[int, str], BinaryIO] = {}

    def write(self, frame: Text) -> None:
        """Appends lines, or a partial line, as the rank wrote them."""
        file = self._file(frame.rank, frame.stream)
        file.write(frame.data)
        file.flush()

    def open(self, rank: int) -> None:
        """Creates the rank's files, which may stay empty."""
        for stream in ("out", "err"):
            self._file(rank, stream)

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()

    def _file(self, rank: int, stream: str) -> BinaryIO:
        key = (rank, stream)
        if key not in self._files:
            path = self._directory / self._roles.directory(rank) / f"std{stream}"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[key] = path.open("wb")
        return self._files[key]


class Output:
    """The screen, and the output files if ``--output-dir`` is given."""

    def __init__(self, screen: Screen, files: Files | None = None) -> None:
        self.screen = screen
        self._files = files

    def write(self, frame: Text) -> None:
        """Writes a rank's output to the screen and to its files."""
        self.screen.write(frame)
        if self._files is not None:
            self._files.write(frame)

    def write_to_file(self, rank: int, text: str) -> None:
        """Writes a rank's final traceback to its file only: the screen shows it with the job's outcome."""
        if self._files is not None and text:
            self._files.write(Text(rank, "err", text.encode("utf-8", "surrogateescape") + b"\n"))

    def open(self, rank: int) -> None:
        """Creates the files of a rank that has started."""
        if self._files is not None:
            self._files.open(rank)

    def close(self) -> None:
        """Ends the partial line on the screen and closes the files."""
        self.screen.finish_line()
        if self._files is not None:
            self._files.close()


def _write(stream: Sink, data: bytes) -> None:
    """Writes all of ``data`` at once; if the reader has closed the pipe, the job continues without output."""
    try:
        stream.write(data)
        stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
