"""What a rank writes, on its way from its pipes to frames."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from choros.launch.protocol.frames import Events, Frame, Result, Text
from choros.launch.wrapper.line_buffer import LineBuffer
from choros.launch.wrapper.traceback_buffer import HoldBack

__all__ = ["ERR", "EVENTS", "OUT", "RESULT", "Transcript"]

#: The pipes of a rank.
OUT, ERR, RESULT, EVENTS = "out", "err", "result", "events"
_TAIL_LINES = 10
#: Of a longer line, so many characters are in the tail.
_TAIL_WIDTH = 1 << 12
#: mpirun and chorosrun take long frames for little more than short ones, up to about this many characters.
_FRAME = 1 << 15
_RESULT_PIECE = 3 << 14


class Transcript:
    """Turns bytes of a rank's pipes into frames: lines at once, tracebacks when it is known what they mean.

    Every method returns the frames that are ready; time is given, never read. Lines that come together share a frame.

    Example:
        >>> list(Transcript(rank=0).feed(OUT, b"hello\\n", now=0.0))
        [Text(rank=0, stream='out', text='hello', end='\\n')]
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines = {OUT: LineBuffer(), ERR: LineBuffer()}
        self._hold = HoldBack()
        self._events = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def traceback(self) -> str:
        """The traceback that is held back, empty if none is."""
        return "\n".join(self._hold.held)

    @property
    def shown(self) -> bool:
        """Whether a traceback was held back and then shown after all."""
        return self._hold.shown

    @property
    def tail(self) -> str:
        """The last lines of standard error."""
        return "\n".join(self._tail)

    def feed(self, stream: str, data: bytes, now: float) -> Iterator[Frame]:
        """Takes what came from a pipe; no data means that the pipe has been closed."""
        if stream == RESULT:
            for start in range(0, len(data), _RESULT_PIECE):
                yield Result(self._rank, base64.b64encode(data[start : start + _RESULT_PIECE]).decode("ascii"))
        elif stream == EVENTS:
            *lines_of_json, self._events = (self._events + data).split(b"\n")
            if lines_of_json:
                yield Events(self._rank, b"\n".join(lines_of_json).decode("ascii"))
        else:
            lines = self._lines[stream]
            yield from self._frames(stream, lines.feed(data, now) if data else lines.flush(), now)

    def due(self, now: float) -> Iterator[Frame]:
        """What has waited long enough, for a rank that is alive."""
        yield from self._frames(OUT, self._lines[OUT].due(now), now)
        yield from self._texts(ERR, ((line, "\n") for line in self._hold.due(now)))
        if not self._hold.held:
            yield from self._frames(ERR, self._lines[ERR].due(now), now)

    def release(self) -> Iterator[Frame]:
        """The traceback that is held back after all, for a rank that has ended and is started again."""
        yield from self._texts(ERR, ((line, "\n") for line in self._hold.held))

    def waits(self, now: float) -> list[float]:
        """After how many seconds something may be due."""
        waits = [self._lines[OUT].wait(now), self._hold.wait(now) if self._hold.held else self._lines[ERR].wait(now)]
        return [wait for wait in waits if wait is not None]

    def _frames(self, stream: str, lines: Sequence[tuple[str, str]], now: float) -> Iterator[Frame]:
        if stream == ERR:
            yield from self._texts(ERR, self._errors(lines, now))
        elif lines:
            self._hold.alive(now)
            yield from self._texts(OUT, lines)

    def _errors(self, lines: Iterable[tuple[str, str]], now: float) -> Iterator[tuple[str, str]]:
        """The lines of standard error that are not held back."""
        for text, end in lines:
            self._tail.append(text[:_TAIL_WIDTH])
            if end != "\n" and not self._hold.held:
                yield text, end
            else:
                yield from ((line, "\n") for line in self._hold.add(text, now))

    def _texts(self, stream: str, lines: Iterable[tuple[str, str]]) -> Iterator[Frame]:
        """Frames of ``lines``: those that end with a newline together."""
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
