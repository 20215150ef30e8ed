"""The running job. There is one at a time: each uses the memory of several processes with a framework."""

from __future__ import annotations

from collections.abc import Callable

from ranks.job import Job
from ranks.running import Broken, CannotStart, Running

_running: Running | None = None
#: Jobs that did not start, with the reason: another attempt for each case would take long.
_failed: dict[Job, Broken | CannotStart] = {}
#: What else forgets what runs have had as results, before a test is made again.
FORGET: list[Callable[[], None]] = []


def running(job: Job) -> Running:
    """Returns ``job`` running; starts it if needed, after another running job has ended."""
    global _running
    if job in _failed:
        raise _failed[job]
    if _running is None or _running.job != job:
        close()
        try:
            _running = Running(job)
        except (Broken, CannotStart) as error:
            _failed[job] = error
            raise
    return _running


def start_anew() -> None:
    """Ends the running job, and lets those start again that did not: the machine may be to blame."""
    close(by_force=True)
    _failed.clear()


def close(*, by_force: bool = False) -> None:
    """Ends the running job, if there is one.

    Args:
        by_force: ranks may not be waiting for a case, and so do not end by themselves.
    """
    global _running
    ending, _running = _running, None
    if ending is not None:
        if by_force:
            ending.kill()
        else:
            ending.close()
