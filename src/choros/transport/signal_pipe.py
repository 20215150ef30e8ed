"""Signals as a descriptor: each that is caught makes it readable, so that a loop wakes up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, final

__all__ = ["Handler", "SignalPipe", "wake_only"]

Handler = Callable[[int, FrameType | None], None]


def wake_only(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing: Python writes the signal's number to the pipe by itself."""


@final
class SignalPipe:
    """Catches signals from ``open`` to ``close``, or for as long as it is entered.

    Only a process' main thread can catch signals; in another thread the pipe stays empty.

    Args:
        handlers: what runs at once when a signal arrives, whatever the main thread is blocked in; ``wake_only`` for
            signals that wait until ``read`` is called.
    """

    def __init__(self, handlers: Mapping[signal.Signals, Handler]) -> None:
        self._handlers = handlers
        self._reader, self._writer = -1, -1
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_writer = -1

    def open(self) -> None:
        """Begins to catch the signals."""
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        if threading.current_thread() is threading.main_thread():
            self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number, handler in self._handlers.items():
                self._previous[number] = signal.signal(number, handler)

    def close(self) -> None:
        """Gives the signals back to those who had them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_writer)
        os.close(self._reader)
        os.close(self._writer)

    def __enter__(self) -> SignalPipe:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """What to wait on."""
        return self._reader

    def read(self) -> list[signal.Signals]:
        """The signals that have come since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self._reader, 256)]
        except BlockingIOError:
            return []
