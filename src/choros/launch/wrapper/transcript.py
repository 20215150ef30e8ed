"""What a rank writes, on its way from its pipes to frames."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Iterator

from choros.launch.protocol.frames import Frame, Result, Text
from choros.launch.wrapper.line_buffer import LineBuffer
from choros.launch.wrapper.traceback_buffer import HoldBack

__all__ = ["ERR", "OUT", "RESULT", "Transcript"]

#: The pipes of a rank.
OUT, ERR, RESULT = "out", "err", "result"
_TAIL_LINES = 10
_RESULT_PIECE = 3 << 14


class Transcript:
    """Turns bytes of a rank's pipes into frames: lines at once, tracebacks when it is known what they mean.

    Every method returns the frames that are ready; time is given, never read.

    Example:
        >>> list(Transcript(rank=0).feed(OUT, b"hello\\n", now=0.0))
        [Text(rank=0, stream='out', text='hello', end='\\n')]
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines = {OUT: LineBuffer(), ERR: LineBuffer()}
        self._hold = HoldBack()
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
        else:
            lines = self._lines[stream]
            yield from self._frames(stream, lines.feed(data, now) if data else lines.flush(), now)

    def due(self, now: float) -> Iterator[Frame]:
        """What has waited long enough, for a rank that is alive."""
        yield from self._frames(OUT, self._lines[OUT].due(now), now)
        for line in self._hold.due(now):
            yield Text(self._rank, ERR, line)
        if not self._hold.held:
            yield from self._frames(ERR, self._lines[ERR].due(now), now)

    def release(self) -> Iterator[Frame]:
        """The traceback that is held back after all, for a rank that has ended and is started again."""
        for line in self._hold.held:
            yield Text(self._rank, ERR, line)

    def waits(self, now: float) -> list[float]:
        """After how many seconds something may be due."""
        waits = [self._lines[OUT].wait(now), self._hold.wait(now) if self._hold.held else self._lines[ERR].wait(now)]
        return [wait for wait in waits if wait is not None]

    def _frames(self, stream: str, lines: Iterable[tuple[str, str]], now: float) -> Iterator[Frame]:
        for text, end in lines:
            if stream == OUT:
                self._hold.alive(now)
                yield Text(self._rank, OUT, text, end)
                continue
            self._tail.append(text)
            if end != "\n" and not self._hold.held:
                yield Text(self._rank, ERR, text, end)
                continue
            for line in self._hold.add(text, now):
                yield Text(self._rank, ERR, line)
