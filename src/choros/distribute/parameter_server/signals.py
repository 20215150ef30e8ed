"""Who ends a job: the chief alone."""

from __future__ import annotations

import signal
import threading

__all__ = ["leave_signals_to_the_chief"]


def leave_signals_to_the_chief() -> None:
    """From now on SIGINT and SIGTERM do nothing here: this process ends when its connection to the chief does.

    Ctrl-C and preemption reach all processes of a job at once, and the chief may want to save first, for which it needs
    the others.
    """
    if threading.current_thread() is threading.main_thread():  # Elsewhere Python lets nobody decide.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
