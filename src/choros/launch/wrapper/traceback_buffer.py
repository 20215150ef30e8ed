"""The traceback buffer: holds tracebacks back until it is known whether the rank ends, so its last one is shown
once, at the end. That of a rank that continues, or whose output is longer or takes longer than a final message,
is ordinary output, shown a moment later; after ``RANK_CRASHED`` the rank may take any time to end.
"""

import re
from dataclasses import dataclass

from choros import durations

_TITLE = b"Traceback (most recent call last):"
_BEGINNING = re.compile(rb"(?:^|(?<=[\r\n]))(?:  \+ Exception Group )?" + re.escape(_TITLE))
#: A rank that continues to write after a traceback is alive.
_AFTER_MORE_OUTPUT = 1.0
#: A silent rank may be shutting down, which takes some frameworks seconds.
_AFTER_SILENCE = 3.0
#: A rank that still writes this long after its traceback has handled the exception, even without pauses.
_LONGEST = 5.0
#: The longest final message of a rank, in bytes.
_MOST = 1 << 17


@dataclass
class TracebackBuffer:
    """Holds back a rank's lines on standard error, from a traceback on; ``shown``: held, then shown, nothing after it.

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
            self._latest, self._last = now + _LONGEST, now
        continues = self._ended and now - self._last > durations.MESSAGE_PAUSE
        self.held += data
        if len(self.held) > _MOST:
            return before + self._release()
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
        return self._release() if wait is not None and wait <= 0 else b""

    def wait(self, now: float) -> float | None:
        """Returns the seconds until what is held is due; ``None`` if it is not, or there is nothing."""
        return max(0.0, self._deadline - now) if self.held and not self._crashed else None

    def _release(self) -> bytes:
        released, self.held = self.held, b""
        self.shown = released[:_MOST]
        return released
