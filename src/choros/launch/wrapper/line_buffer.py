"""The line buffer: passes on bytes up to the end of a line; a partial line when no more bytes arrive for a moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LineBuffer"]

#: After this time without more bytes, a partial line is passed on: a prompt, a row of dots.
_FLUSH_SECONDS = 0.2
#: A longer partial line is passed on at once.
_LONGEST = 1 << 15


@dataclass
class LineBuffer:
    """Buffers one output stream of a rank. A line ends with a newline, or with a carriage return (a progress bar).

    Example:
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
        return self.flush() if self._pending and now >= self._since + _FLUSH_SECONDS else b""

    def flush(self) -> bytes:
        """Returns the partial line, empty if there is none."""
        pending, self._pending = self._pending, b""
        return pending

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the partial line is due; ``None`` if there is none."""
        return max(0.0, self._since + _FLUSH_SECONDS - now) if self._pending else None
