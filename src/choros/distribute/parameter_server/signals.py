"""Signals in workers and servers: ignored, because only the chief ends a job."""

from __future__ import annotations

import signal
import threading

__all__ = ["leave_signals_to_the_chief"]


def leave_signals_to_the_chief() -> None:
    """Ignores SIGINT and SIGTERM from now on: this process ends when its connection to the chief closes.

    Ctrl-C and preemption reach all processes of a job at once, and the chief may want to save first, for which it needs
    the other processes.
    """
    if threading.current_thread() is threading.main_thread():  # Python allows it in the main thread only.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
