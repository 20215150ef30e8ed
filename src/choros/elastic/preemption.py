"""Preemption: SIGTERM or SIGUSR1 asks a rank of an elastic job, or the whole job, to end, and it does after a step.

::

                 one rank is asked                         chorosrun is asked, and asks all
    rank 0       step 17 ──── step 18, without rank 1      step 17 ──── commit ── exits with 75
    rank 1       step 17 ──── exits with 0                 step 17 ────   ▲       exits with 75
                   ▲                                         ▲            │
                   SIGTERM                                   SIGTERM      END, the notice of the rank that was first,
                                                                          in the agreement that ends step 17

To the others, a rank that leaves is lost in its next step, of which it has applied nothing; by its ``LEAVES`` they
know not to replace it. If several are asked, one leaves after each step. If all end, they must after the same step:
that of the notice, as signals come in different ones. SIGWINCH asks all ranks that commit for the same, as the job goes
on on other hosts; it never ends others. A second signal ends a rank at once, unless all are to end, as chorosrun kills
them then if it gets another; so does a request to end a job without commits. A program's own handler takes the place of
this one.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType

import numpy as np

from choros.comm import END, LEAVES, Reduction, Request, global_process_set, is_initialized, leave_alone
from choros.comm.request import CollectiveSpec
from choros.errors import PREEMPTED
from choros.observe import MOVE
from choros.observe.progress import page
from choros.settings import current

_log = logging.getLogger("choros")
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LEAVING = Request("ranks that were asked to end", spec=CollectiveSpec("agreement"))

#: The signal by which this rank was asked to end; 0: by none.
_asked = 0
#: Whether all ranks commit by ``end_job`` if the job ends.
_commits: Callable[[], bool] = bool
#: What ends the handlers of this process, the last one first.
_handling: list[Callable[..., None]] = []


def watch_signals(commits: Callable[[], bool] | None = None) -> Callable[[], None]:
    """Lets this rank end between two steps if asked, in an elastic job, until the returned function is called.
    ``commits``: whether all ranks commit by ``end_job`` if the job ends, else they end at once; ``None``: others know.
    """
    global _commits
    elastic = is_initialized() and global_process_set.communicator.elastic
    if not elastic or threading.current_thread() is not threading.main_thread():
        return lambda: None
    before, _commits = _commits, commits or _commits
    unwatch = handle([number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL], _on_signal)
    if signal.getsignal(MOVE) is signal.SIG_DFL:
        signal.signal(MOVE, _on_move)
    if (cloud := current().spot_notices) != "none":
        from choros.elastic.spot import watch_spot  # takes 30 ms; jobs elsewhere do not need it

        watch_spot(cloud, lambda: bool(_asked))

    def stop() -> None:
        global _commits
        _commits = before
        unwatch()

    return stop


def handle(signals: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Callable[[], None]:
    """Lets ``handler`` handle signals until the returned function is called, in the main thread like this one.
    Processes that this one forks are ended by them, as those of ``multiprocessing`` must be.
    """
    before = {number: signal.signal(number, handler) for number in signals}

    def stop(*, ends: bool = False) -> None:
        if stop in _handling:
            _handling.remove(stop)
        for number, previous in before.items():
            if previous is not None and signal.getsignal(number) is handler:  # ``None``: not Python's own
                signal.signal(number, signal.SIG_IGN if ends else previous)

    if before:
        _handling.insert(0, stop)
    return stop


def ignore_signals() -> None:
    """Ignores the signals that are handled, as this process ends. The one by which it is asked, too, may come as late
    as when Python has restored their defaults, and would make its end that of a killed process.
    """
    if threading.current_thread() is threading.main_thread():
        while _handling:
            _handling[0](ends=True)


def _before_fork() -> None:
    """Python forgets signals that the new process gets before it can end the handlers: until then they wait."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    while _handling:
        _handling[0]()
    _after_fork()


_mask = threading.local()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    global _asked
    if not is_initialized() or (not _commits() if page.job_is_to_end else _asked):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _asked = number
    _note(END if page.job_is_to_end or _are_too_few(leaving=1) else LEAVES)


def _note(notice: int) -> None:
    communicator = global_process_set.communicator
    communicator.notice = communicator.notice & ~LEAVES | notice


def _are_too_few(*, leaving: int) -> bool:
    """Whether the job is to commit and end, as it could not go on without those that leave."""
    return global_process_set.communicator.size - leaving < current().min_np and _commits()


def _on_move(number: int, _frame: FrameType | None) -> None:
    del number
    if _commits():
        global_process_set.communicator.notice |= END


def job_ends() -> bool:
    """Whether the job was asked to end: the same on all ranks that have made the same collectives."""
    return bool(global_process_set.communicator.noticed & END)


def all_are_here() -> bool:
    """Whether no rank has joined the others, as at the end of its batches; those that have not call it together."""
    communicator = global_process_set.communicator
    return bool(communicator.allreduce(np.ones(()), Reduction.SUM, name="ranks here") == communicator.size)


def end_job(commit: Callable[[], None]) -> None:
    """Commits, and ends this rank by ``SystemExit``; all ranks call it after the same step, and rank 0 writes."""
    communicator = global_process_set.communicator
    while True:
        writer = communicator.launched[0]
        commit()
        communicator.barrier(name="commit")
        if communicator.launched[0] == writer:  # else it was lost, maybe before it has written
            ignore_signals()
            sys.exit(PREEMPTED)


def leave_if_asked(*, one_by_one: bool = False) -> None:
    """``SystemExit`` if this rank alone was asked to end; call it between two steps, after all of the first one.
    ``one_by_one``: all ranks call it, and of several only the first leaves, as two may have a slice and its copy.
    """
    communicator = global_process_set.communicator
    asked, known = communicator.notice & LEAVES, communicator.noticed & LEAVES  # a signal may come at any moment
    waits = False
    if one_by_one and known and not communicator.is_new:
        leaving = communicator.agree(_LEAVING, value=int(bool(asked)))
        waits = 1 in leaving[: communicator.rank]
    if not asked or not (known or communicator.is_new):
        return
    if not communicator.is_new and _are_too_few(leaving=1 + waits):  # some may have been lost since the signal
        _note(END)
    elif not waits:
        ignore_signals()
        name = signal.Signals(_asked).name
        _log.warning("this rank was asked to end by %s: it leaves after this step, and the others go on.", name)
        leave_alone()
        sys.exit(0)
