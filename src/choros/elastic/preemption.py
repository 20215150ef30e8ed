"""Preemption: a rank of an elastic job, or the whole job, is asked to end by SIGTERM or SIGUSR1, and does after a step.

::

                 one rank is asked                         chorosrun is asked, and asks all
    rank 0       step 17 ──── step 18, without rank 1      step 17 ──── commit ── exits with 75
    rank 1       step 17 ──── exits with 0                 step 17 ────   ▲       exits with 75
                   ▲                                         ▲            │
                   SIGTERM                                   SIGTERM      END, the notice of the rank that was first,
                                                                          in the agreement that ends step 17

To the others, a rank that leaves is lost in its next step, of which it has applied nothing; by its notice ``LEAVES``
they know that it is not to be replaced. If all end, they must do so after the same step; the signal reaches them in
different ones, and the notice all in the same.

SIGWINCH asks for the same, of all ranks that commit, because the job goes on on other hosts then; it never ends a rank
that does not.

A second signal ends a rank at once, as does a request to end a job without commits. A handler of the program's own
takes the place of this one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from choros.comm import END, LEAVES, global_process_set, is_initialized, leave_alone
from choros.config import MIN_NP
from choros.errors import PREEMPTED
from choros.observe import MOVE
from choros.observe.progress import page

__all__ = ["end_job", "fewest_ranks", "job_ends", "leave_if_asked", "watch_signals"]

_log = logging.getLogger("choros")
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _Asked:
    """What this rank was asked.

    Attributes:
        signal: the signal; 0 before.
        ends_job: whether the whole job is to end: chorosrun was asked, or too few ranks would be left.
        commits: returns whether the program commits when the job is to end.
    """

    signal = 0
    ends_job = False
    commits: Callable[[], bool] = staticmethod(lambda: False)


_asked = _Asked()


def watch_signals(commits: Callable[[], bool] | None = None) -> Callable[[], None]:
    """From now on, this rank ends between two steps if it is asked to; in jobs that are not elastic, nothing changes.

    Args:
        commits: returns whether all ranks commit, by ``end_job``, if the whole job is to end; else they end at once.
            ``None``: who has called this function before, or will, knows.

    Returns:
        A function that ends this.
    """
    elastic = is_initialized() and global_process_set.communicator.elastic
    if not elastic or threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = _asked.commits
    if commits is not None:
        _asked.commits = commits
    watched = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in watched:
        signal.signal(number, _on_signal)
    if signal.getsignal(MOVE) is signal.SIG_DFL:
        signal.signal(MOVE, _on_move)

    def stop() -> None:
        if commits is not None:
            _asked.commits = before
        for number in watched:
            if signal.getsignal(number) is _on_signal:
                signal.signal(number, signal.SIG_DFL)

    return stop


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if _asked.signal or not is_initialized() or (page.job_is_to_end and not _asked.commits()):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    communicator = global_process_set.communicator
    too_few = communicator.size <= fewest_ranks()
    _asked.signal, _asked.ends_job = number, page.job_is_to_end or (too_few and _asked.commits())
    communicator.notice |= END if _asked.ends_job else LEAVES


def _on_move(number: int, _frame: FrameType | None) -> None:
    del number
    if _asked.commits():
        global_process_set.communicator.notice |= END


def fewest_ranks() -> int:
    """The number of ranks with which the job goes on."""
    return int(MIN_NP.number(os.environ, "ranks"))


def job_ends() -> bool:
    """Whether the job was asked to end: the same on all ranks that have made the same collectives."""
    return bool(global_process_set.communicator.noticed & END)


def end_job(commit: Callable[[], None]) -> None:
    """Commits, and ends this rank; all ranks call it after the same step.

    Args:
        commit: commits; on all ranks, of which rank 0 writes.

    Raises:
        SystemExit: always.
    """
    communicator = global_process_set.communicator
    while True:
        writer = communicator.launched[0]
        commit()
        communicator.barrier(name="commit")
        if communicator.launched[0] == writer:  # else it was lost, maybe before it has written
            sys.exit(PREEMPTED)


def leave_if_asked() -> None:
    """Ends this rank if it alone was asked to end; call it between two steps, after all that belongs to the first one.

    Raises:
        SystemExit: it was asked.
    """
    communicator = global_process_set.communicator
    if _asked.signal and not _asked.ends_job and (communicator.noticed & LEAVES or communicator.is_new):
        name = signal.Signals(_asked.signal).name
        _log.warning("this rank was asked to end by %s: it leaves after this step, and the others go on.", name)
        leave_alone()
        sys.exit(0)
