"""The transcript of a rank: converts the bytes from its pipes to frames."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from choros.launch.protocol.frames import Events, Frame, Result, Text
from choros.launch.wrapper.line_buffer import LineBuffer
from choros.launch.wrapper.traceback_buffer import TracebackBuffer

__all__ = ["ERR", "EVENTS", "OUT", "RESULT", "Transcript"]

#: The pipes of a rank.
OUT, ERR, RESULT, EVENTS = "out", "err", "result", "events"
_TAIL_LINES = 10
#: A line in the tail is cut to this many characters.
_TAIL_WIDTH = 1 << 12
#: Up to about this many characters, long frames cost mpirun and chorosrun hardly more than short ones.
_FRAME = 1 << 15
_RESULT_CHUNK = 3 << 14


class Transcript:
    """Converts bytes from a rank's pipes to frames: lines at once, tracebacks once the rank is known to continue.

    Every method returns the frames that are ready; the time is an argument. Lines that arrive together share a frame.

    Example:
        >>> list(Transcript(rank=0).feed(OUT, b"hello\\n", now=0.0))
        [Text(rank=0, stream='out', text='hello', end='\\n')]
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines = {OUT: LineBuffer(), ERR: LineBuffer()}
        self._traceback_buffer = TracebackBuffer()
        self._events = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def traceback(self) -> str:
        """The traceback that is held back; empty if there is none."""
        return "\n".join(self._traceback_buffer.held)

    @property
    def shown(self) -> bool:
        """Whether the last traceback was held back and then shown."""
        return self._traceback_buffer.shown

    @property
    def tail(self) -> str:
        """The last lines of standard error."""
        return "\n".join(self._tail)

    def feed(self, stream: str, data: bytes, now: float) -> Iterator[Frame]:
        """Adds data from a pipe; empty data means that the pipe is closed."""
        if stream == RESULT:
            for start in range(0, len(data), _RESULT_CHUNK):
                yield Result(self._rank, base64.b64encode(data[start : start + _RESULT_CHUNK]).decode("ascii"))
        elif stream == EVENTS:
            *lines_of_json, self._events = (self._events + data).split(b"\n")
            if lines_of_json:
                yield Events(self._rank, b"\n".join(lines_of_json).decode("ascii"))
        else:
            lines = self._lines[stream]
            yield from self._frames(stream, lines.feed(data, now) if data else lines.flush(), now)

    def due(self, now: float) -> Iterator[Frame]:
        """Yields the lines that have waited long enough, for a rank that is alive."""
        yield from self._frames(OUT, self._lines[OUT].due(now), now)
        yield from self._texts(ERR, ((line, "\n") for line in self._traceback_buffer.due(now)))
        if not self._traceback_buffer.held:
            yield from self._frames(ERR, self._lines[ERR].due(now), now)

    def release(self) -> Iterator[Frame]:
        """Yields the traceback that is held back, for a rank that has ended and is restarted."""
        yield from self._texts(ERR, ((line, "\n") for line in self._traceback_buffer.held))

    def waits(self, now: float) -> list[float]:
        """Returns the seconds after which lines may be due."""
        errors = self._traceback_buffer if self._traceback_buffer.held else self._lines[ERR]
        return [wait for wait in (self._lines[OUT].wait(now), errors.wait(now)) if wait is not None]

    def _frames(self, stream: str, lines: Sequence[tuple[str, str]], now: float) -> Iterator[Frame]:
        if stream == ERR:
            yield from self._texts(ERR, self._errors(lines, now))
        elif lines:
            self._traceback_buffer.alive(now)
            yield from self._texts(OUT, lines)

    def _errors(self, lines: Iterable[tuple[str, str]], now: float) -> Iterator[tuple[str, str]]:
        """Yields the lines of standard error that are not held back."""
        for text, end in lines:
            self._tail.append(text[:_TAIL_WIDTH])
            if end != "\n" and not self._traceback_buffer.held:
                yield text, end
            else:
                yield from ((line, "\n") for line in self._traceback_buffer.add(text, now))

    def _texts(self, stream: str, lines: Iterable[tuple[str, str]]) -> Iterator[Frame]:
        """Yields the frames of ``lines``; lines that end with a newline share a frame."""
        together: list[str] = []
        length = 0
        for text, end in lines:
            if end == "\n":
                together.append(text)
                length += len(text) + 1
            if together and (end != "\n" or length >= _FRAME):
                yield Text(self._rank, stream, "\n".join(together))
                together, length = [], 0
            if end != "\n":
                yield Text(self._rank, stream, text, end)
        if together:
            yield Text(self._rank, stream, "\n".join(together))
