"""The line buffer: splits bytes into lines; passes on a partial line when no more bytes arrive for a moment."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["LineBuffer"]

_END = re.compile(rb"\r?\n|\r(?!\n)")
#: After this time without more bytes, a partial line is passed on: a prompt, a row of dots.
_FLUSH_SECONDS = 0.2
#: A longer line is passed on in chunks of this many bytes.
_LONGEST = 1 << 15


@dataclass
class LineBuffer:
    """Buffers one output stream of a rank.

    Example:
        >>> lines = LineBuffer()
        >>> lines.feed(b"one\\r\\n 50%\\r100%\\rtw", now=0.0)
        [('one', '\\n'), (' 50%', '\\r'), ('100%', '\\r')]
        >>> lines.due(now=1.0)
        [('tw', '')]
    """

    _pending: bytes = b""
    _since: float = 0.0

    def feed(self, data: bytes, now: float) -> list[tuple[str, str]]:
        """Adds bytes; returns ``(text, end)`` of every line they complete."""
        buffer, position, lines = self._pending + data, 0, []
        self._since = now
        if b"\r" not in buffer:  # same result, but faster: ranks may write millions of lines
            whole, newline, self._pending = buffer.rpartition(b"\n")
            lines = [(line, "\n") for line in _text(whole).split("\n")] if newline else []
        else:
            # A carriage return at the very end may be the first half of "\r\n": wait for what follows.
            limit = len(buffer) - 1 if buffer.endswith(b"\r") else len(buffer)
            for match in _END.finditer(buffer, 0, limit):
                lines.append((_text(buffer[position : match.start()]), "\r" if match[0] == b"\r" else "\n"))
                position = match.end()
            self._pending = buffer[position:]
        while len(self._pending) > _LONGEST:
            chunk, self._pending = self._pending[:_LONGEST], self._pending[_LONGEST:]
            lines.append((_text(chunk), ""))
        return lines

    def due(self, now: float) -> list[tuple[str, str]]:
        """Returns the partial line, if it has waited long enough."""
        return self.flush() if self._pending and now >= self._since + _FLUSH_SECONDS else []

    def flush(self) -> list[tuple[str, str]]:
        """Returns the partial line, if there is one."""
        pending, self._pending = self._pending, b""
        if not pending:
            return []
        return [(_text(pending[:-1]), "\r")] if pending.endswith(b"\r") else [(_text(pending), "")]

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the partial line is due; ``None`` if there is none."""
        return max(0.0, self._since + _FLUSH_SECONDS - now) if self._pending else None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
