"""Tracebacks are held back until it is known whether the rank dies of them.

A rank that dies shows its traceback once, as the last thing on the terminal, not somewhere in the middle of
what the other ranks print. A rank that prints a traceback and goes on has handled the exception: then it is
ordinary output, a moment late. So is what is more, or goes on for longer, than any last message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HoldBack"]

_BEGINNINGS = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
#: Lines that follow each other faster are one message: many exceptions say more than a line.
_ONE_BREATH = 0.2
#: A rank that keeps writing after a traceback is alive.
_AFTER_MORE_OUTPUT = 1.0
#: One that is silent may be shutting down, which takes a framework its time.
_AFTER_SILENCE = 3.0
#: One that still writes so long after its traceback has survived it, however short its pauses.
_LONGEST = 5.0
#: As much is still the message of a rank that dies, in characters.
_MOST = 1 << 17


@dataclass
class HoldBack:
    """Holds a rank's lines of standard error from a traceback on.

    Example:
        >>> hold = HoldBack()
        >>> hold.add("Traceback (most recent call last):", now=0.0)
        []
        >>> hold.add("ValueError: no", now=0.0)
        []
        >>> hold.due(now=2.0)
        []
        >>> hold.due(now=3.5)
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
        """Takes a line; returns the lines to show now."""
        if not self.held:
            if not line.startswith(_BEGINNINGS):
                return [line]
            self._ended, self.shown = False, False
            self._latest, self._length = now + _LONGEST, 0
        self.held.append(line)
        self._length += len(line) + 1
        if self._length > _MOST:
            return self._release()
        goes_on = self._ended and now - self._last > _ONE_BREATH
        self._deadline = min(self._latest, now + (_AFTER_MORE_OUTPUT if goes_on else _AFTER_SILENCE))
        self._last = now
        self._note_end(line)
        return []

    def alive(self, now: float) -> None:
        """The rank wrote something else."""
        if self.held and self._ended:
            self._deadline = min(self._deadline, now + _AFTER_MORE_OUTPUT)

    def due(self, now: float) -> list[str]:
        """The held lines, once the rank has outlived them."""
        if not self.held or now < self._deadline:
            return []
        return self._release()

    def wait(self, now: float) -> float | None:
        """Seconds until lines are due; ``None`` while nothing is held."""
        return max(0.0, self._deadline - now) if self.held else None

    def _release(self) -> list[str]:
        lines, self.held, self.shown = self.held, [], True
        return lines

    def _note_end(self, line: str) -> None:
        """The line that names the exception is the first one after the beginning that is not indented."""
        if line.startswith(_BEGINNINGS):
            self._ended = False
        elif line and not line[0].isspace():
            self._ended = True
