"""The stages in which a job is stopped: a signal that ranks can handle, then SIGKILL.

::

    a rank fails, hangs SIGTERM ── 2.5 s ──► SIGKILL ── 1.5 s ──► mpirun is ended
    too few are left    SIGTERM ── grace period, to commit ──► SIGKILL ── …
    Ctrl-C              SIGINT ── grace period ──► SIGKILL ── …
    SIGTERM, a timeout  SIGTERM ── grace period ──► SIGKILL ── …
    a second Ctrl-C     SIGKILL ── …

    the chief ends      grace period, in which the others end by themselves; then as if a rank had failed

As soon as every rank has ended, in any stage, the wrappers are released.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

__all__ = ["Reason", "Stage", "signal_name", "stages"]


class Reason(enum.Enum):
    """Why a job is stopped."""

    FAILURE = enum.auto()
    #: A rank waits for one that has ended, or ranks wait for each other.
    STUCK = enum.auto()
    #: A rank has ended without leaving the job, when the scripts of all had ended.
    OVER = enum.auto()
    #: Fewer ranks of an elastic job are left than it may have.
    TOO_FEW = enum.auto()
    #: A rank of an elastic job on several hosts has lost others, which may be alive: none goes on.
    LOST = enum.auto()
    #: The chief ended with 0, and other processes did not end within the grace period.
    DONE = enum.auto()
    INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    TIMEOUT = enum.auto()
    START_TIMEOUT = enum.auto()


@dataclass(frozen=True)
class Stage:
    """Send the ranks ``signal``, then wait at most ``seconds`` for them to end."""

    signal: signal.Signals
    seconds: float


_KILL = Stage(signal.SIGKILL, 1.5)


def stages(reason: Reason, grace: float) -> tuple[Stage, ...]:
    """Returns the stages of stopping for ``reason``; ranks that are allowed to save have ``grace`` seconds for it.

    Example:
        >>> [stage.signal.name for stage in stages(Reason.INTERRUPT, grace=20)]
        ['SIGINT', 'SIGKILL']
    """
    if reason is Reason.START_TIMEOUT:
        return (_KILL,)
    if reason in (Reason.FAILURE, Reason.LOST, Reason.STUCK, Reason.OVER, Reason.DONE):
        return (Stage(signal.SIGTERM, 2.5), _KILL)
    first = signal.SIGINT if reason is Reason.INTERRUPT else signal.SIGTERM
    return (Stage(first, grace), _KILL)


def signal_name(number: int) -> str:
    """Returns the name of signal ``number``.

    Example:
        >>> signal_name(9)
        'SIGKILL'
    """
    return next((known.name for known in signal.Signals if known == number), "a real-time signal")
