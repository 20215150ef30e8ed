"""Bytes become lines, as they come: whole ones at once, a piece of one when nothing follows for a moment."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["LineBuffer"]

_END = re.compile(rb"\r?\n|\r(?!\n)")
#: After this long without its end, a piece of a line is passed on: a prompt, a row of dots.
_PATIENCE = 0.2
#: A line is passed on in pieces of this many bytes.
_LONGEST = 1 << 15


@dataclass
class LineBuffer:
    """Collects what a rank writes to one stream.

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
        """Takes bytes; returns ``(text, end)`` of every line they complete."""
        buffer, position, lines = self._pending + data, 0, []
        self._since = now
        if b"\r" not in buffer:  # the same, faster: ranks may write millions of lines
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
            piece, self._pending = self._pending[:_LONGEST], self._pending[_LONGEST:]
            lines.append((_text(piece), ""))
        return lines

    def due(self, now: float) -> list[tuple[str, str]]:
        """The piece of a line that has waited long enough, if there is one."""
        return self.flush() if self._pending and now >= self._since + _PATIENCE else []

    def flush(self) -> list[tuple[str, str]]:
        """Whatever is left."""
        pending, self._pending = self._pending, b""
        if not pending:
            return []
        return [(_text(pending[:-1]), "\r")] if pending.endswith(b"\r") else [(_text(pending), "")]

    def wait(self, now: float) -> float | None:
        """Seconds until a piece is due; ``None`` while nothing waits."""
        return max(0.0, self._since + _PATIENCE - now) if self._pending else None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
