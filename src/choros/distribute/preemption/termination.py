"""Requests to end this process: their detection, and the configuration of the exit."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from choros.errors import ConfigError, StrategyError

__all__ = ["Notice", "TerminationConfig"]

_POLL_SECONDS = 1.0
_log = logging.getLogger("choros")


@final
@dataclass(frozen=True)
class TerminationConfig:
    """How a job detects that it must end, and how it ends (``tf.distribute.experimental.TerminationConfig``).

    Attributes:
        termination_watcher_fn: polled once a second, in a separate thread; returns whether this process is going to be
            ended, for example from a cloud's metadata server. ``None`` waits for SIGTERM instead.
        exit_fn: called on every process after the last checkpoint is written. ``None`` is ``sys.exit(42)``.
        grace_period: the seconds between the request and the actual end of a process. Training continues meanwhile: a
            checkpoint is written at once, and another one shortly before the period is over. ``None`` is 0.
        save_fn: replaces the checkpoint's or its manager's ``save``, with the same arguments, on process 0.

    Raises:
        ConfigError: the grace period is negative or not a number.

    Example:
        >>> import sys
        >>> config = TerminationConfig(exit_fn=lambda: sys.exit(75), grace_period=3600)
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None and not self.grace_period >= 0:
            raise ConfigError(
                f"TerminationConfig(grace_period={self.grace_period!r}): expected seconds of at least 0, or None."
            )


@final
class Notice:
    """Watches, until ``stop``, for a request to end this process.

    Args:
        watcher: polled once a second; ``None`` waits for SIGTERM, whose other effects are suppressed.

    Raises:
        StrategyError: there is no watcher, and this is not the main thread, the only one that can handle signals.
    """

    def __init__(self, watcher: Callable[[], bool] | None) -> None:
        self._requested_at: float | None = None
        self._stopped = threading.Event()
        self._previous: Any = None
        if watcher is not None:
            threading.Thread(target=self._poll, args=(watcher,), name="choros-termination", daemon=True).start()
            return
        if threading.current_thread() is not threading.main_thread():
            raise StrategyError(
                "PreemptionCheckpointHandler was created in a thread, but Python handles SIGTERM in the main thread "
                "only: create it there, or pass TerminationConfig(termination_watcher_fn=…)."
            )
        self._previous = signal.signal(signal.SIGTERM, self._record)

    @property
    def age(self) -> float | None:
        """The seconds since the request; ``None`` if there was none."""
        return None if self._requested_at is None else time.monotonic() - self._requested_at

    def stop(self) -> None:
        """Stops watching; restores SIGTERM's previous handler. Call it in the thread that created this object."""
        self._stopped.set()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _record(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._requested_at is None:
            self._requested_at = time.monotonic()

    def _poll(self, watcher: Callable[[], bool]) -> None:
        warned = False
        while not self._stopped.is_set():
            try:
                requested = watcher()
            except Exception as error:  # noqa: BLE001  (one failure must not end the training)
                requested = False
                if not warned:
                    _log.warning(
                        "termination_watcher_fn failed, and will be called again: %s: %s", type(error).__name__, error
                    )
                warned = True
            if requested:
                self._requested_at = time.monotonic()
                return
            self._stopped.wait(_POLL_SECONDS)
