"""What a rank writes, as its wrapper reads it: pipes, whose bytes become frames, and a page
(``observe/progress.py``). A rank that waits in C for data that do not move cannot report it: the page says so.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO

from choros import durations
from choros.launch.protocol.frames import ERR, EVENTS, OUT, RESULT, Frame, Written
from choros.observe.events import Event, Kind
from choros.observe.processes import resident_bytes
from choros.observe.progress import PAGE_BYTES, PROGRESS_FD, RankProgress, note_end, read_page
from choros.transport.loop import Loop

#: A longer partial line is passed on at once.
_LONGEST = 1 << 15


@dataclass
class LineBuffer:
    """Buffers one output stream of a rank. A line ends with a newline, or a carriage return (a progress bar).

    >>> lines = LineBuffer()
    >>> lines.feed(b"one\\r\\n 50%\\r100%\\rtw", now=0.0)
    b'one\\r\\n 50%\\r100%\\r'
    >>> lines.due(now=1.0)
    b'tw'
    """

    _pending: bytes = b""
    _since: float = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Adds bytes; returns those up to the end of the last line that is complete."""
        buffer = self._pending + data
        self._since = now
        # A carriage return at the very end may be the first half of "\r\n": wait for what follows.
        end = max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, len(buffer) - 1)) + 1
        if len(buffer) - end > _LONGEST:
            end = len(buffer)
        self._pending = buffer[end:]
        return buffer[:end]

    def due(self, now: float) -> bytes:
        """Returns the partial line, if it has waited long enough."""
        return self.flush() if self._pending and now >= self._since + durations.PARTIAL_LINE else b""

    def flush(self) -> bytes:
        """Returns the partial line, empty if there is none."""
        pending, self._pending = self._pending, b""
        return pending

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the partial line is due; ``None`` if there is none."""
        return max(0.0, self._since + durations.PARTIAL_LINE - now) if self._pending else None


_TITLE = b"Traceback (most recent call last):"
_BEGINNING = re.compile(rb"(?:^|(?<=[\r\n]))(?:  \+ Exception Group )?" + re.escape(_TITLE))
#: A rank that continues to write after a traceback is alive.
_AFTER_MORE_OUTPUT = 1.0
#: A silent rank may be shutting down, which takes some frameworks seconds.
_AFTER_SILENCE = 3.0
#: A rank that still writes this long after its traceback has handled the exception, even without pauses.
_LATEST = 5.0
#: The longest final message of a rank, in bytes.
_MOST = 1 << 17


@dataclass
class TracebackBuffer:
    """Holds tracebacks back until it is known whether the rank ends, so its last one is shown once, at the end.
    That of a rank that continues, or whose output is longer or takes longer than a final message, is ordinary output,
    shown a moment later; after ``RANK_CRASHED`` the rank may take any time to end. ``shown``: held, then shown, nothing
    after it.

    >>> buffer = TracebackBuffer()
    >>> buffer.add(b"Traceback (most recent call last):\\nValueError: no\\n", now=0.0)
    b''
    >>> buffer.due(now=2.0)
    b''
    >>> buffer.due(now=3.5)
    b'Traceback (most recent call last):\\nValueError: no\\n'
    """

    held: bytes = b""
    shown: bytes = b""
    _deadline: float = 0.0
    _latest: float = 0.0
    _ended: bool = False
    _last: float = 0.0
    _crashed: bool = False

    def add(self, data: bytes, now: float) -> bytes:
        """Adds lines; returns what to show now."""
        if not data:
            return data
        before = b""
        if not self.held:
            self.shown = b""
            begin = _BEGINNING.search(data) if _TITLE in data else None
            if begin is None:
                return data
            before, data = data[: begin.start()], data[begin.start() :]
            self._ended = False
            self._latest, self._last = now + _LATEST, now
        continues = self._ended and now - self._last > durations.MESSAGE_PAUSE
        self.held += data
        if len(self.held) > _MOST:
            return before + self.release()
        self._deadline = min(self._latest, now + (_AFTER_MORE_OUTPUT if continues else _AFTER_SILENCE))
        self._last = now
        for line in data.splitlines():  # the end is the first line that is not indented, which names the exception
            if _BEGINNING.match(line):
                self._ended = False
            elif line and not line[:1].isspace():
                self._ended = True
        return before

    def alive(self, now: float) -> None:
        """Records that the rank wrote to standard output: after its traceback, it is still alive."""
        if self.held and self._ended:
            self._deadline = min(self._deadline, now + _AFTER_MORE_OUTPUT)

    def crashed(self) -> None:
        """Records that an exception ends the rank: its traceback is held until the rank has ended."""
        self._crashed = True

    def due(self, now: float) -> bytes:
        """Returns what is held, once the rank is known to have handled the exception."""
        wait = self.wait(now)
        return self.release() if wait is not None and wait <= 0 else b""

    def wait(self, now: float) -> float | None:
        """Returns the seconds until what is held is due; ``None`` if it is not, or there is nothing."""
        return max(0.0, self._deadline - now) if self.held and not self._crashed else None

    def release(self) -> bytes:
        """Returns what is held: the rank has handled the exception."""
        released, self.held = self.held, b""
        self.shown = released[:_MOST]
        return released


#: In the event of a rank that an exception ends.
_CRASHED = b'"kind":"rank crashed"'
#: What Open MPI prints for collectives that a lost rank has interrupted, and its connections, which choros handles.
_NOISES = (b"NBC_Progress: an error ", b"[warn] Epoll ")
_NOISY_LINES = re.compile(
    rb"^(?:NBC_Progress: an error \d+ was found .*\n\n?|\[warn\] Epoll [A-Z]+\(\d+\) on fd \d+ failed\..*\n)",
    re.MULTILINE,
)
_TAIL_LINES = 10
#: A line in the tail is cut to this many bytes.
_TAIL_WIDTH = 1 << 12
#: That many bytes of standard error contain the tail.
_TAIL_BYTES = _TAIL_LINES * _TAIL_WIDTH
#: Up to about this many bytes, long frames cost mpirun and chorosrun hardly more than short ones.
_FRAME = 1 << 15


class Transcript:
    """Converts a rank's bytes to frames: lines at once, which share one, tracebacks once it is known to continue.

    >>> list(Transcript(rank=0).feed(OUT, b"hello\\n", now=0.0))
    [Written(rank=0, stream='out', data=b'hello\\n')]
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines = {OUT: LineBuffer(), ERR: LineBuffer()}
        self._traceback_buffer = TracebackBuffer()
        self._events = b""
        self._errors = b""
        self._ends_with_noise = False

    @property
    def traceback(self) -> str:
        """The traceback that is held back; empty if there is none."""
        return _text(self._traceback_buffer.held)

    @property
    def shown(self) -> str:
        """A traceback that was held back and then shown, if nothing came after it on standard error."""
        return _text(self._traceback_buffer.shown)

    @property
    def tail(self) -> str:
        """The last lines of standard error."""
        lines = self._errors.replace(b"\r", b"\n").splitlines()[-_TAIL_LINES:]
        return "\n".join(_text(line[:_TAIL_WIDTH]) for line in lines)

    def feed(self, stream: str, data: bytes, now: float) -> Iterator[Frame]:
        """Adds data from a pipe; empty data means that the pipe is closed."""
        if stream == RESULT:
            for start in range(0, len(data), _FRAME):
                yield Written(self._rank, RESULT, data[start : start + _FRAME])
        elif stream == EVENTS:
            *lines_of_json, self._events = (self._events + data).split(b"\n")
            if any(_CRASHED in line for line in lines_of_json):
                self._traceback_buffer.crashed()
            if lines_of_json:
                yield Written(self._rank, EVENTS, b"\n".join(lines_of_json))
        else:
            lines = self._lines[stream]
            yield from self._frames(stream, lines.feed(data, now) if data else lines.flush(), now)

    def due(self, now: float) -> Iterator[Frame]:
        """Yields the lines that have waited long enough, for a rank that is alive."""
        yield from self._frames(OUT, self._lines[OUT].due(now), now)
        yield from self._texts(ERR, self._traceback_buffer.due(now))
        if not self._traceback_buffer.held:
            yield from self._frames(ERR, self._lines[ERR].due(now), now)

    def release(self) -> Iterator[Frame]:
        """Yields the traceback that is held back, and no longer holds it: it is not the rank's last word."""
        yield from self._texts(ERR, self._traceback_buffer.release())

    def waits(self, now: float) -> list[float]:
        """Returns the seconds after which lines may be due."""
        errors = self._traceback_buffer if self._traceback_buffer.held else self._lines[ERR]
        return [wait for wait in (self._lines[OUT].wait(now), errors.wait(now)) if wait is not None]

    def _frames(self, stream: str, data: bytes, now: float) -> Iterator[Frame]:
        if stream == ERR:
            if self._ends_with_noise:
                data = data.removeprefix(b"\n")  # the empty line after it
            self._ends_with_noise = False
            if any(noise in data for noise in _NOISES):
                self._ends_with_noise = data.endswith(b" schedule\n")
                data = _NOISY_LINES.sub(b"", data)
            self._errors = (self._errors + data)[-_TAIL_BYTES:]
            data = self._traceback_buffer.add(data, now)
        elif data:
            self._traceback_buffer.alive(now)
        yield from self._texts(stream, data)

    def _texts(self, stream: str, data: bytes) -> Iterator[Frame]:
        while len(data) > _FRAME:
            cut = max(data.rfind(b"\n", 0, _FRAME), data.rfind(b"\r", 0, _FRAME - 1)) + 1 or _FRAME
            yield Written(self._rank, stream, data[:cut])
            data = data[cut:]
        if data:
            yield Written(self._rank, stream, data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape").replace("\r\n", "\n").removesuffix("\n")


_PIPE_READ = 1 << 16
#: After a read smaller than this, wait for more data to fill a frame: one frame per line costs ten times as much.
_SMALL_READ = 1 << 14


@dataclass(eq=False)
class RankOutput:
    """Reads what ``rank`` writes, and sends the frames by ``send``; ``is_alive``: whether the rank runs."""

    rank: int
    loop: Loop
    send: Callable[[Frame], None]
    is_alive: Callable[[], bool]
    transcript: Transcript = field(init=False)
    _pipes: set[IO[bytes] | int] = field(default_factory=set)
    _page: int | None = None
    _stalled: str = ""

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.rank)

    def restart(self) -> dict[str, str]:
        """Begins anew, for a rank that will be started; returns the variable of its page, if the system has such."""
        self.release()
        self.transcript = Transcript(self.rank)
        if self._page is not None:
            os.close(self._page)
        self._page = None
        if not hasattr(os, "memfd_create"):  # not on macOS
            return {}
        try:
            page = os.memfd_create("choros progress", 0)
            os.ftruncate(page, PAGE_BYTES)
        except OSError:
            return {}
        self._page = page
        return {PROGRESS_FD: str(page)}

    def add(self, name: str, pipe: IO[bytes] | int) -> None:
        """Reads ``pipe``, which its ``Transcript`` calls ``name``, from now on."""
        self._pipes.add(pipe)
        self.loop.on_readable(pipe, partial(self._read, name, pipe))

    def drain(self) -> None:
        """Reads the rest of the pipes, whose writers have ended."""
        self.loop.run(until=lambda: not self._pipes, seconds=1.0)

    def release(self) -> None:
        """Sends the traceback that is held back, which is not the rank's last word."""
        self._send_all(self.transcript.release())

    def _read(self, name: str, pipe: IO[bytes] | int) -> None:
        data = os.read(pipe if isinstance(pipe, int) else pipe.fileno(), _PIPE_READ)
        if not data:
            self.loop.forget(pipe)
            self._pipes.discard(pipe)
        elif len(data) < _SMALL_READ:
            self.loop.forget(pipe)
            read_on = partial(self.loop.on_readable, pipe, partial(self._read, name, pipe))
            self.loop.set_deadline(f"read {name}", durations.BATCH, read_on)
        self._send_all(self.transcript.feed(name, data, time.monotonic()))
        self._plan_due()

    def _plan_due(self) -> None:
        self.loop.set_deadline("due", min(self.transcript.waits(time.monotonic()), default=None), self._send_due)

    def _send_due(self) -> None:
        if self.is_alive():  # the last output of a rank that has ended is part of its report
            self._send_all(self.transcript.due(time.monotonic()))
            self._plan_due()

    def _send_all(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self.send(frame)

    def note_end(self) -> None:
        """Tells the rank that the whole job is asked to end."""
        if self._page is not None:
            note_end(self._page)

    def send_progress(self, pid: int) -> None:
        """Sends what the rank, process ``pid``, has written to its page, if it has, and how much memory it has."""
        done = self._done()
        if done.last:
            self.send(replace(done, memory=resident_bytes(pid) or 0))

    def watch_data(self, stall: float, *, repeat: bool = False) -> None:
        """Reports, from now on, that a collective's data move for over ``stall`` s; with ``repeat`` more than once."""
        if not stall or not self.is_alive():
            return
        done = self._done()
        seconds = done.ago
        moves = done.moves and done.last_size > 1
        stalled = done.last if moves and seconds >= stall else ""
        for kind, call in ((Kind.WAITED, self._stalled), (Kind.WAITING, stalled)):
            if call and (self._stalled != stalled or (kind is Kind.WAITING and repeat)):
                event = Event(kind, call, self.rank, time.time(), {"seconds": seconds, "matched": done.last_size})
                self.send(Written(self.rank, EVENTS, event.to_json().encode()))
        self._stalled = stalled
        after = stall - seconds if moves and not stalled else stall / 2
        look = partial(self.watch_data, stall, repeat=repeat)
        self.loop.set_deadline("data", min(max(after, 0.1), stall / 2), look)

    def _done(self) -> RankProgress:
        if self._page is None:
            return RankProgress(self.rank)
        return read_page(os.pread(self._page, PAGE_BYTES, 0), self.rank)
