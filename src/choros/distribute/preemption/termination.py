"""When this process has been told to end, and what is then to happen."""

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
    """How a job learns that it must end, and how it ends (``tf.distribute.experimental.TerminationConfig``).

    Attributes:
        termination_watcher_fn: asked once a second, in a thread of its own, whether this process is going to be ended:
            a cloud's metadata server can tell. ``None`` waits for SIGTERM instead.
        exit_fn: called on every process when the last checkpoint is written. ``None`` is ``sys.exit(42)``.
        grace_period: how many seconds after it was told a process will really be ended. Training goes on for that long:
            a checkpoint is written at once, and another one shortly before the time is over. ``None`` is 0.
        save_fn: called in place of the checkpoint's or its manager's ``save``, with the same arguments, on process 0.

    Raises:
        ConfigError: the grace period is no number of seconds of at least 0.

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
                f"TerminationConfig(grace_period={self.grace_period!r}): a number of seconds of at least 0, or None."
            )


@final
class Notice:
    """Watches, until ``stop``, for this process being told to end.

    Args:
        watcher: asked once a second; ``None`` waits for SIGTERM, which then does nothing else.

    Raises:
        StrategyError: there is no watcher, and this is not the main thread, which alone can wait for signals.
    """

    def __init__(self, watcher: Callable[[], bool] | None) -> None:
        self._told_at: float | None = None
        self._stopped = threading.Event()
        self._previous: Any = None
        if watcher is not None:
            threading.Thread(target=self._poll, args=(watcher,), name="choros-termination", daemon=True).start()
            return
        if threading.current_thread() is not threading.main_thread():
            raise StrategyError(
                "PreemptionCheckpointHandler was made in a thread, and Python tells the main thread alone of SIGTERM: "
                "make it there, or give it TerminationConfig(termination_watcher_fn=…)."
            )
        self._previous = signal.signal(signal.SIGTERM, self._note)

    @property
    def age(self) -> float | None:
        """How many seconds ago the process was told; ``None`` if it was not."""
        return None if self._told_at is None else time.monotonic() - self._told_at

    def stop(self) -> None:
        """Watches no longer; SIGTERM does what it did before. Call it in the thread that made this."""
        self._stopped.set()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._told_at is None:
            self._told_at = time.monotonic()

    def _poll(self, watcher: Callable[[], bool]) -> None:
        warned = False
        while not self._stopped.is_set():
            try:
                told = watcher()
            except Exception as error:  # noqa: BLE001  (a question that fails once must not end the training)
                told = False
                if not warned:
                    _log.warning(
                        "termination_watcher_fn failed, and is asked again: %s: %s", type(error).__name__, error
                    )
                warned = True
            if told:
                self._told_at = time.monotonic()
                return
            self._stopped.wait(_POLL_SECONDS)
