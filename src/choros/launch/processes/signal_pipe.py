"""Signals as messages: they arrive on a descriptor that a selector can wait for."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SignalInbox"]

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SignalInbox:
    """Catches the signals a job reacts to, for as long as it is entered.

    Only a process' main thread can catch signals; in another thread the inbox stays empty.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._handlers: dict[signal.Signals, Any] = {}
        self._previous_writer = -1

    def __enter__(self) -> SignalInbox:
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        if threading.current_thread() is threading.main_thread():
            self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in _CAUGHT:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self._handlers[number] = signal.signal(number, _wake_up_only)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_writer)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """What to wait on."""
        return self._reader

    def read(self) -> list[signal.Signals]:
        """The signals that have come since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self._reader, 256)]
        except BlockingIOError:
            return []


def _wake_up_only(number: int, frame: FrameType | None) -> None:
    """Python writes the signal's number to the inbox; there is nothing else to do."""
