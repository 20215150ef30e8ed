"""The ranks' output: written to the terminal, each line prefixed with the ranks that wrote it, and to files.

Equal lines that several ranks write on standard error within a moment become one::

    rank 0 writes  a    b    c                    held                               shown
    rank 1 writes    a    d    c       ──────►    a {0,1}  b {0}  d {1}  c {0,1}     [0-1] a
                                                  the first leaves when all ranks    [0] b
                                                  have written it, or after a moment …

A line joins an equal one only where its rank's lines keep their order. Standard output, partial lines and progress
bars are not merged; they are held only behind lines of their own rank.
"""

import errno
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import final

from choros import durations
from choros.errors import ConfigError
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.job import Job
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.frames import ERR, OUT, Written
from choros.ownership import overwrite

#: If a rank writes more than this at once, nothing of it is merged: to read each line would slow the rank down.
_MOST_LINES, _MOST_BYTES = 50, 1 << 13
#: If more is held than this, the first leave earlier, so that a search takes no time.
_MOST_HELD = 60
#: Time and thread at the beginning of a logger's line: ``2026-01-31 12:00:00.123456: I``, ``WARNING:2026-…``, or
#: Abseil's ``I0000 00:00:1769860800.123456   1234``. Group 1 precedes them.
_STAMP = re.compile(
    rb"\A(\W{0,3}[A-Z]{0,9}\W{0,3})"
    rb"(?:\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|\d{4} \d\d:\d\d:\d+[:.\d]*(?: +\d+)?)"
)
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class Lines:
    """Output to show: lines with their ends, or a partial line, and the ranks that wrote it, in increasing order."""

    ranks: tuple[int, ...]
    stream: str
    data: bytes


@dataclass
class _Held:
    """Output that is held; ``key`` is what equal lines have in common, ``None`` for output that is not merged."""

    ranks: list[int]
    stream: str
    data: bytes
    due: float
    key: bytes | None


@final
class LineMerger:
    """Merges equal lines, whatever their logger's time and thread; methods return the output to show at time ``now``.

    >>> merger = LineMerger(size=2)
    >>> merger.add(Written(0, "err", b"hello\\n"), now=0.0)
    []
    >>> merger.add(Written(1, "err", b"hello\\n"), now=0.01)
    [Lines(ranks=(0, 1), stream='err', data=b'hello\\n')]
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[_Held] = []
        #: The ranks that have written a partial line on standard error.
        self._unfinished: set[int] = set()

    def add(self, text: Written, now: float) -> list[Lines]:
        """Adds output of a rank."""
        for data, key in self._parts(text):
            if key is None or not self._join(text.rank, key):
                place = len(self._held)
                while key is None and place and text.rank not in self._held[place - 1].ranks:
                    place -= 1  # only behind lines of its own rank
                self._held.insert(place, _Held([text.rank], text.stream, data, now + durations.MERGE, key))
        return self.due(now)

    def due(self, now: float) -> list[Lines]:
        """Returns what need not be held any longer."""
        late = max((number for number, held in enumerate(self._held, 1) if held.due <= now), default=0)
        count = max(late, len(self._held) - _MOST_HELD)
        while count < len(self._held) and self._is_complete(self._held[count]):
            count += 1
        return self._leave(count)

    def flush(self) -> list[Lines]:
        """Returns all that is held."""
        return self._leave(len(self._held))

    def wait(self, now: float) -> float | None:
        """Returns the seconds until something is due; ``None`` if nothing is held."""
        return max(0.0, min(held.due for held in self._held) - now) if self._held else None

    def _parts(self, text: Written) -> Iterator[tuple[bytes, bytes | None]]:
        """Yields lines that may be merged, with their keys, and all other output, without one."""
        if text.stream != ERR:
            yield text.data, None
            return
        data = text.data
        if text.rank in self._unfinished:
            end = data.find(b"\n") + 1 or len(data)
            yield data[:end], None
            if not data.endswith(b"\n", 0, end):
                return
            self._unfinished.discard(text.rank)
            data = data[end:]
        if data and not data.endswith(b"\n"):
            self._unfinished.add(text.rank)
        if len(data) > _MOST_BYTES or data.count(b"\n") > _MOST_LINES:
            yield data, None
        else:
            yield from ((line, _key(line)) for line in _LINE.findall(data))

    def _join(self, rank: int, key: bytes) -> bool:
        """Adds ``rank`` to an equal line that others have written, if there is one that it may join."""
        for place, held in enumerate(self._held):
            if held.key != key or rank in held.ranks:
                continue
            own = [later for later in self._held[place:] if rank in later.ranks]
            if all(later.ranks == [rank] for later in own):
                others = [later for later in self._held[place:] if rank not in later.ranks]
                self._held[place:] = [*own, *others]
                held.ranks.append(rank)
                return True
        return False

    def _is_complete(self, held: _Held) -> bool:
        return held.key is None or len(held.ranks) == self._size

    def _leave(self, count: int) -> list[Lines]:
        leaving, self._held = self._held[:count], self._held[count:]
        groups = groupby(leaving, key=lambda held: (tuple(sorted(held.ranks)), held.stream))
        return [Lines(ranks, stream, b"".join(held.data for held in group)) for (ranks, stream), group in groups]


def _key(line: bytes) -> bytes | None:
    """Returns what equal lines have in common; ``None`` for a partial line, and for a progress bar."""
    if not line.endswith(b"\n") or b"\r" in line.rstrip(b"\r\n"):
        return None
    return _STAMP.sub(rb"\1", line)


_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CLEAR_TO_END = b"\x1b[K"


#: Writes all of the bytes to a stream; raises an ``OSError`` if that is not possible.
Write = Callable[[bytes], object]


_screen = threading.local()


@contextmanager
def not_waiting(once: Callable[[], bool]) -> Iterator[None]:
    """A context in which this thread waits no more for who reads its screen, ``once`` a job is to end."""
    _screen.gives_up = once
    try:
        yield
    finally:
        del _screen.gives_up


def write_screen(descriptor: int, data: bytes) -> None:
    """Writes without a buffer: what cannot be written is known at once. A pipe may be full, a terminal stopped."""
    rest, gives_up = memoryview(data), getattr(_screen, "gives_up", lambda: False)
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    while rest:
        if ready.poll(durations.SCREEN_LOOK * 1000):
            with suppress(BlockingIOError):  # a terminal that another program has set to non-blocking mode
                rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]  # so many do not block
        elif gives_up():
            raise OSError(errno.ETIMEDOUT, "it is not read")


def use_colour(environ: Mapping[str, str], terminal: bool) -> bool:
    """Returns whether to colour output to a ``terminal``: https://no-color.org."""
    return terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


@contextmanager
def shown_if_slow(message: str, seconds: float, show: Callable[[str], object]) -> Iterator[None]:
    """Shows ``message`` if the block has not ended after ``seconds``, and a thread can be started."""
    timer = threading.Timer(seconds, show, [message])
    timer.daemon = True
    with suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


#: Descriptors, by rank and stream.
Files = dict[tuple[int, str], int]


def open_files(directory: Path, size: int, roles: Roles = NO_ROLES) -> Files:
    """Creates ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``, or ``DIR/worker.N/…``, of each rank."""
    files: Files = {}
    for rank in range(size):
        for stream in (OUT, ERR):
            path = directory / roles.directory(rank) / f"std{stream}"
            try:
                files[rank, stream] = overwrite(path)
            except OSError as error:
                why = error.strerror or error
                raise ConfigError(f"--output-dir {directory}: {path} cannot be created: {why}.") from error
    return files


class Output:
    """Shows the ranks' output, whose equal lines ``merger`` merges; a partial line ends first when another rank writes.
    ``files``: those of ``--output-dir``, which have all lines.
    """

    def __init__(
        self,
        out: Write,
        err: Write,
        *,
        prefix: bool,
        colour: bool,
        roles: Roles = NO_ROLES,
        timestamp: bool = False,
        files: Files | None = None,
        merger: LineMerger | None = None,
    ) -> None:
        self._streams: dict[str, Write | None] = {OUT: out, ERR: err}
        self._prefix = prefix
        self._timestamp = timestamp
        self._colour = colour
        self._roles = roles
        self._open: tuple[tuple[int, ...], str] | None = None
        self._files = files or {}
        self._merger = merger or LineMerger(1)
        self._listen: Callable[[str], None] = lambda _text: None
        self._listen_to_bytes: Callable[[bytes], None] = lambda _data: None

    def write(self, text: Written) -> None:
        """Writes a rank's output to its files, and to the screen, where lines may be held: see ``due_after``."""
        self._show(self._merger.add(text, time.monotonic()))
        self._write_to_file(text)

    def write_due(self) -> None:
        """Writes the held lines that are due to the screen."""
        self._show(self._merger.due(time.monotonic()))

    def due_after(self) -> float | None:
        """Returns the seconds after which held lines are due; ``None`` if there are none."""
        return self._merger.wait(time.monotonic())

    def flush(self) -> None:
        """Writes all held lines to the screen."""
        self._show(self._merger.flush())

    def write_to_file(self, rank: int, text: str) -> None:
        """Writes a rank's final traceback to its file only: the screen shows it with the job's outcome."""
        if text:
            self._write_to_file(Written(rank, ERR, text.encode("utf-8", "surrogateescape") + b"\n"))

    def show(self, text: str) -> None:
        """Shows a message of chorosrun itself, after all that the ranks have written."""
        self.flush()
        self._show_now(text)
        self._listen(text)

    def listen(self, listener: Callable[[str], None], to_bytes: Callable[[bytes], None]) -> None:
        """Calls ``listener`` with all further messages of chorosrun, and ``to_bytes`` with all that is written."""
        self._listen, self._listen_to_bytes = listener, to_bytes

    def finish(self) -> None:
        """Writes all held lines and ends the partial line on the screen: no rank writes any more."""
        self.flush()
        self._finish_line()

    def close(self) -> None:
        """Finishes the output and closes the files."""
        self.finish()
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _show(self, lines: Iterable[Lines]) -> None:
        for each in lines:
            self._write_lines(each)

    def _write_lines(self, lines: Lines) -> None:
        writer, data = (lines.ranks, lines.stream), lines.data
        if not self._prefix and not self._timestamp:
            if self._open not in (None, writer):
                self._finish_line()
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
            self._finish_line()
            data = label + data
        body, end = (data[:-1], data[-1:]) if data.endswith((b"\n", b"\r")) else (data, b"")
        body = body.replace(b"\r", b"\r" + label).replace(b"\n", b"\n" + label) + end
        if self._colour:
            body = body.replace(b"\r", _CLEAR_TO_END + b"\r")
        self._write(lines.stream, body)
        self._open = None if end else writer

    def _finish_line(self) -> None:
        """Ends the partial line, if there is one."""
        if self._open is not None:
            self._write(self._open[1], b"\n")
            self._open = None

    def _show_now(self, text: str) -> None:
        self._finish_line()
        self._write(ERR, text.encode("utf-8", "surrogateescape") + b"\n")

    def _write(self, name: str, data: bytes) -> None:
        """Writes to a stream. If that is not possible any more, the job continues without it."""
        write = self._streams[name]
        self._listen_to_bytes(data)
        try:
            if write is not None:
                write(data)
        except OSError as error:
            self._streams[name] = None
            if not isinstance(error, BrokenPipeError) and name == OUT:  # "| head" is no error
                self._show_now(
                    f"chorosrun: standard output cannot be written ({error.strerror}); the job continues without it."
                )

    def _label(self, ranks: tuple[int, ...]) -> bytes:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamp else b""
        label = f"[{self._roles.label(*ranks)}] ".encode() if self._prefix else b""
        if not self._colour or not label or len(ranks) > 1:
            return stamp + label
        return b"%s\x1b[%dm%s\x1b[0m" % (stamp, _COLOURS[ranks[0] % len(_COLOURS)], label)

    def _write_to_file(self, text: Written) -> None:
        try:
            if self._files:
                rest = memoryview(text.data)
                while rest:
                    rest = rest[os.write(self._files[text.rank, text.stream], rest) :]
        except OSError as error:
            self._files = {}
            self.show(
                f"chorosrun: --output-dir: a file cannot be written ({error.strerror}). From here on, the output of "
                "the ranks is not written to files."
            )


def output_of(job: Job, arguments: Arguments, out: Write, err: Write, *, colour: bool) -> Output:
    """Returns the output of a job, as its arguments want it."""
    prefix, directory = arguments.prefix(job.most), arguments.output_dir
    timestamp = arguments.prefix_output_with_timestamp
    files = open_files(Path(directory), job.most, job.roles) if directory else None
    merger = LineMerger(job.most) if arguments.merge(job.most, os.environ) else None
    return Output(
        out, err, prefix=prefix, colour=colour, roles=job.roles, timestamp=timestamp, files=files, merger=merger
    )
