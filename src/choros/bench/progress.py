"""Progress lines on standard error, for long runs."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO, final

__all__ = ["Progress"]

_SILENT_SECONDS = 2.0
_LINE_EVERY = 10.0


@final
class Progress:
    """Shows progress from two seconds after the start: on a terminal one line, rewritten; elsewhere a line every 10 s.

    Example:
        >>> with Progress() as progress:
        ...     progress.show("starting")  # nothing is shown yet
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._last = time.monotonic() + _SILENT_SECONDS - (0.0 if self._terminal else _LINE_EVERY)
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._write("", "\r")

    def show(self, text: str) -> None:
        """Shows ``text`` in place of the text before it."""
        now = time.monotonic()
        if now < self._last + (0.0 if self._terminal else _LINE_EVERY):
            return
        if not self._terminal:
            self._last = now
            print(f"choros bench: {text}", file=self._stream, flush=True)
            return
        self._write(text, "")

    def _write(self, text: str, end: str) -> None:
        print(f"\r{text.ljust(self._width)}", end=end, file=self._stream, flush=True)
        self._width = len(text)
