"""The traceback buffer: holds tracebacks back until it is known whether the rank ends.

The traceback of a rank that fails is shown once, as the last output on the terminal, not in the middle of the other
ranks' output. A rank that prints a traceback and continues has handled the exception: its traceback is ordinary
output, shown a moment later. The same holds for output that is longer, or takes longer, than any final message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["TracebackBuffer"]

_BEGINNINGS = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
#: Lines with shorter pauses between them are one message: the messages of many exceptions have several lines.
_MESSAGE_PAUSE = 0.2
#: A rank that continues to write after a traceback is alive.
_AFTER_MORE_OUTPUT = 1.0
#: A silent rank may be shutting down, which takes some frameworks seconds.
_AFTER_SILENCE = 3.0
#: A rank that still writes this long after its traceback has handled the exception, even without pauses.
_LONGEST = 5.0
#: The longest final message of a rank, in characters.
_MOST = 1 << 17


@dataclass
class TracebackBuffer:
    """Holds back a rank's lines on standard error, beginning with a traceback.

    Example:
        >>> buffer = TracebackBuffer()
        >>> buffer.add("Traceback (most recent call last):", now=0.0)
        []
        >>> buffer.add("ValueError: no", now=0.0)
        []
        >>> buffer.due(now=2.0)
        []
        >>> buffer.due(now=3.5)
        ['Traceback (most recent call last):', 'ValueError: no']
    """

    held: list[str] = field(default_factory=list)
    shown: bool = False
    _deadline: float = 0.0
    _latest: float = 0.0
    _length: int = 0
    _ended: bool = False
    _last: float = 0.0

    def add(self, line: str, now: float) -> list[str]:
        """Adds a line; returns the lines to show now."""
        if not self.held:
            if not line.startswith(_BEGINNINGS):
                return [line]
            self._ended, self.shown = False, False
            self._latest, self._length = now + _LONGEST, 0
        self.held.append(line)
        self._length += len(line) + 1
        if self._length > _MOST:
            return self._release()
        continues = self._ended and now - self._last > _MESSAGE_PAUSE
        self._deadline = min(self._latest, now + (_AFTER_MORE_OUTPUT if continues else _AFTER_SILENCE))
        self._last = now
        self._note_end(line)
        return []

    def alive(self, now: float) -> None:
        """Records that the rank wrote to standard output: after its traceback, it is still alive."""
        if self.held and self._ended:
            self._deadline = min(self._deadline, now + _AFTER_MORE_OUTPUT)

    def due(self, now: float) -> list[str]:
        """Returns the held lines, once the rank is known to have handled the exception."""
        if not self.held or now < self._deadline:
            return []
        return self._release()

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the held lines are due; ``None`` if there are none."""
        return max(0.0, self._deadline - now) if self.held else None

    def _release(self) -> list[str]:
        lines, self.held, self.shown = self.held, [], True
        return lines

    def _note_end(self, line: str) -> None:
        """Detects the end of the traceback: the first line that is not indented, which names the exception."""
        if line.startswith(_BEGINNINGS):
            self._ended = False
        elif line and not line[0].isspace():
            self._ended = True
