"""The time limits of a job."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The time limits of a job, in seconds.

    Attributes:
        start: until every rank has started.
        run: until the job has ended; ``None``: no limit.
        exit: from the end of a rank's script to the end of its process, while all others wait or have ended.
        exit_of_all: the same, while no rank waits or has ended; ``None``: no limit.
        grace: from SIGINT or SIGTERM to SIGKILL; also from the chief's end to the first signal to the other processes.
        stall: from the begin of a rank's wait until it is shown; 0: it is not shown.
        stall_shutdown: from the begin of a rank's wait until it ends the job; 0: it does not.
    """

    start: float = 30.0
    run: float | None = None
    grace: float = 20.0
    exit: float = 300.0
    exit_of_all: float | None = None
    stall: float = 60.0
    stall_shutdown: float = 0.0
