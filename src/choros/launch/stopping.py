"""How a job is stopped: politely, then not, in stages.

::

    a rank fails        SIGTERM ── 2.5 s ──► SIGKILL ── 1.5 s ──► mpirun is ended
    Ctrl-C              SIGINT ── grace period ──► SIGKILL ── …
    SIGTERM, a timeout  SIGTERM ── grace period ──► SIGKILL ── …
    a second Ctrl-C     SIGKILL ── …

As soon as every rank has ended, whatever stage was reached, the wrappers are let go.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

__all__ = ["Reason", "Stage", "stages"]


class Reason(enum.Enum):
    """Why a job is stopped; the value is chorosrun's exit code, 0 where another rule gives it."""

    FAILURE = 0
    INTERRUPT = 130
    TERMINATE = 143
    TIMEOUT = 124
    START_TIMEOUT = 70


@dataclass(frozen=True)
class Stage:
    """Send the ranks ``signal``, then wait at most ``seconds`` for them to end."""

    signal: signal.Signals
    seconds: float


_BY_FORCE = Stage(signal.SIGKILL, 1.5)


def stages(reason: Reason, grace: float) -> tuple[Stage, ...]:
    """The stages of stopping for ``reason``, when ranks that can save have ``grace`` seconds to do it.

    Example:
        >>> [stage.signal.name for stage in stages(Reason.INTERRUPT, grace=20)]
        ['SIGINT', 'SIGKILL']
    """
    if reason is Reason.START_TIMEOUT:
        return (_BY_FORCE,)
    if reason is Reason.FAILURE:
        return (Stage(signal.SIGTERM, 2.5), _BY_FORCE)
    polite = signal.SIGINT if reason is Reason.INTERRUPT else signal.SIGTERM
    return (Stage(polite, grace), _BY_FORCE)
