"""The process's position in its job, between ``init()`` and ``shutdown()``."""

import atexit
import importlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import ismethod
from types import TracebackType
from typing import Any

import numpy as np

from choros.comm.communicator import Communicator
from choros.comm.engines import select
from choros.comm.engines.local import LocalCommunicator
from choros.comm.facts import without_facts
from choros.comm.members import NEWCOMER
from choros.comm.primitives import Change
from choros.comm.process import Listeners, exit_with_code_of_loss, open_standard_files, show_log
from choros.comm.process_set import ProcessSet, global_process_set
from choros.comm.recording import end_recording, merge_after_crash, start_recording
from choros.comm.request import SHUTDOWN, called_at
from choros.comm.waiting import reported
from choros.errors import ChorosError, ConfigError, EngineError, NotInitializedError
from choros.observe import events
from choros.settings import Config, horovod_unused, keep
from choros.topology import Topology, detect


@dataclass
class _JobState:
    topology: Topology
    communicator: Communicator
    finalize: Callable[[], None]
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    next_id: int = 1
    openings: int = 0


_log = logging.getLogger("choros")
_job: _JobState | None = None
#: An exception ended the main program, or this rank leaves the others: it must end, not wait for them.
_crashed = False
_listeners = Listeners()
_finalize: Callable[[], None] | None = None
#: Each returns the listener, if it is still there.
_change_listeners: list[Callable[[], Callable[[Change], None] | None]] = []


def init(comm: Any = None, process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None) -> None:
    """Joins the job this process was started in, or a job of one rank if no launcher started it.

    Calling it again changes nothing. ``shutdown()`` then ``init()`` works any number of times, also after one failed.

    Args:
        comm: ``None`` for all ranks, a list of ranks to leave the others out, or an mpi4py communicator.
        process_sets: sets to register at once; ``"dynamic"`` (Horovod) is accepted, sets can always be added.

    Raises:
        ConfigError: the environment contradicts itself, a process set is invalid or given twice, or this process is
            initialised already and lacks one of the process sets.
        EngineUnavailable: the engine that is needed cannot run here.

    Example:
        >>> import choros
        >>> choros.init()
        >>> choros.size()
        1
        >>> choros.shutdown()
    """
    global _job
    given = () if isinstance(process_sets, str) or process_sets is None else tuple(process_sets)
    sets = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in given]
    if _job is not None:
        _check_registered(_job, given)
        return
    open_standard_files()
    _install_hooks()
    config = Config.from_environ(os.environ)
    launched = detect(os.environ)
    keep(config)
    show_log(config)
    events.identify(launched.rank)
    try:
        _listeners.begin(config)
        communicator, position, finalize = _start_engine(config, launched, comm)
    except BaseException:
        _listeners.stop()
        keep(None)
        raise
    events.identify(position.rank)
    if position.rank == 0:
        _log_unused(config, communicator)
    _job = _JobState(position, communicator, finalize)
    global_process_set.register(0, range(communicator.size), communicator)
    communicator.on_change = _on_change
    try:
        _watch_other_hosts(_job)
        if config.timeline is not None:
            start_recording(communicator, config.timeline, mark_cycles=config.mark_cycles)
        for process_set in _sets_of_all_ranks(communicator, sets):
            add_process_set(process_set)
    except ChorosError:
        shutdown()  # all ranks were given the same sets, so all of them are here
        raise


def _log_unused(config: Config, communicator: Communicator) -> None:
    for sentence in horovod_unused(os.environ):
        _log.info("%s", sentence)
    if config.elastic and not communicator.elastic:
        _log.warning(
            "this elastic job has the %s engine, which does not go on without a rank that is lost: the others end with "
            "69. Only the mpi engine does.",
            communicator.engine,
        )


def shutdown() -> None:
    """Leaves the job, after all ranks have called it; called automatically when the process ends.

    A rank that still calls a collective gets a ``MismatchError`` that says this one has shut down.
    """
    global _job
    job = _job
    if job is None:
        return
    try:
        size = job.communicator.size
        try:
            end_recording(job.communicator, SHUTDOWN)
        finally:
            _job = None  # not before: a rank may be lost in it
        # With others, for which it has waited here, unless it is alone; a new rank was with none.
        if not job.communicator.is_new and (job.communicator.size > 1 or size == 1):
            events.emit(events.Kind.FINISHED, events.SHUTDOWN)
    except EngineError:
        # Another rank has ended, or has received the shutdown and continues. What is collective can no longer be freed.
        job.finalize = lambda: None
        for process_set in (*job.process_sets.values(), global_process_set):
            process_set.abandon()
    else:
        for process_set in (*job.process_sets.values(), global_process_set):
            process_set.unregister()
    _listeners.stop()
    keep(None)
    global _finalize
    _finalize = partial(_end, job)


def _on_change(change: Change) -> None:
    """Ranks were lost, or have joined: updates this process's position and the process sets."""
    job = _current("a change of the ranks")
    for rank in change.joined:  # chorosrun knows of it before this rank's end, whatever becomes of the new rank's word
        events.emit(events.Kind.RANK_JOINED, number=job.communicator.launched[rank])
    hosts = job.communicator.hosts()
    job.topology = Topology.from_hosts(hosts, job.communicator.rank, launcher=job.topology.launcher)
    global_process_set.changed(job.communicator.ranks, admits=bool(change.joined))
    for process_set in job.process_sets.values():
        left = [change.new_ranks[rank] for rank in process_set.ranks if rank in change.new_ranks]
        process_set.changed(left)
    if job.topology.rank == 0:
        _log.warning("%s.", change)
    events.identify(job.topology.rank)
    for reference in [*_change_listeners]:
        listener = reference()
        if listener is not None:
            listener(change)


def on_change(listener: Callable[[Change], None]) -> Callable[[], None]:
    """Calls ``listener`` in the collective in which all notice a loss or a new rank; returns what ends this, which the
    end of its object does, too, if it is a method.
    """
    reference = weakref.WeakMethod(listener, _change_listeners.remove) if ismethod(listener) else lambda: listener
    _change_listeners.append(reference)
    return lambda: _change_listeners.remove(reference)


@contextmanager
def raising_losses() -> Iterator[None]:
    """Within it, a collective that loses a rank raises a ``PeerLostError``, once; those left go on with the next."""
    communicator = _current("raising_losses()").communicator
    outer, communicator.raises_loss = communicator.raises_loss, True
    try:
        yield
    finally:
        if _job is not None:  # it may have another communicator, see admit()
            _job.communicator.raises_loss = outer


@contextmanager
def opening(*, admits: bool = True) -> Iterator[None]:
    """Where new ranks replace lost ones of an elastic job, when all call ``admit``; all enter it at the same place. If
    it does not ``admit``, no new rank is started for it. One in another is a part of it, and takes in none.
    """
    job = _current("opening()")
    # A new rank cannot become a member of process sets that exist.
    admits = admits and not job.process_sets and not job.openings
    job.openings += 1
    try:
        with job.communicator.opening() if admits else nullcontext(), without_facts():
            yield
    finally:
        job.openings -= 1


def openings() -> int:
    """How many openings the program is in: two in ``fit`` that is called in a function of ``elastic.run``."""
    return 0 if _job is None else _job.openings


def admit() -> bool:
    """Takes in a new rank, as the last one, if one waits, and returns whether; all ranks call it, in an ``opening``. A
    new rank waits here: ``False`` if the others are in a later opening, ``SystemExit`` if it is not needed any more.
    """
    job = _current("admit()")
    if not isinstance(job.communicator, LocalCommunicator) or job.communicator.enter is None:
        if not (job.communicator.noticed & NEWCOMER and job.communicator.admit()):
            return False
        _watch_other_hosts(job)
        return True
    new = job.communicator
    entered = job.communicator.enter()
    communicator = entered or LocalCommunicator(new.size - 1, new.hosts(), new.enter)  # of the same ranks, the last one
    communicator.opening, communicator.raises_loss = new.opening, new.raises_loss
    job.communicator = communicator
    job.topology = Topology.from_hosts(communicator.hosts(), communicator.rank, launcher=job.topology.launcher)
    global_process_set.register(0, communicator.ranks, communicator)
    communicator.notice |= new.notice  # only now, as a signal until then was noted there
    if entered is None:
        return False
    global_process_set.changed(communicator.ranks, admits=True)  # what this process knew of all ranks, it knew alone
    communicator.on_change = _on_change
    events.emit(events.Kind.RANK_JOINED, number=communicator.launched[-1])
    events.identify(job.topology.rank)
    _watch_other_hosts(job)
    return True


def _watch_other_hosts(job: _JobState) -> None:
    """Looks at the connections to other hosts, if there are any; all ranks call it."""
    communicator = job.communicator
    has_other_hosts = communicator.engine == "mpi" and job.topology.local_size < communicator.size
    if has_other_hosts and not communicator.is_new and sys.platform.startswith("linux"):
        from choros.comm.other_hosts import watch_other_hosts

        watch_other_hosts(communicator)


def leave_alone() -> None:
    """From now on this rank of an elastic job communicates no more, also not when it ends: the others lose it."""
    global _crashed
    _crashed = True


def is_initialized() -> bool:
    """Whether ``init()`` was called, and ``shutdown()`` was not since."""
    return _job is not None


def topology(what: str = "this function") -> Topology:
    """This process's position; before ``init()``, a ``NotInitializedError`` in which ``what`` names the caller."""
    return _current(what).topology


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a subset of the ranks; all ranks must call it, in the same order.

    Args:
        process_set: the set, or its ranks.

    Raises:
        ConfigError: a registered set has the same ranks.
    """
    job = _current("add_process_set()")
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    for known in (global_process_set, *job.process_sets.values()):
        if known.ranks == new.ranks:
            raise ConfigError(f"{known} has the same ranks already.")
    communicator = job.communicator.split(new.ranks)
    new.register(job.next_id, new.ranks, communicator)
    if communicator is not None:
        communicator.on_change = lambda _: new.changed(communicator.ranks)
    job.process_sets[job.next_id] = new
    job.next_id += 1
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregisters a set; all ranks must call it.

    Returns:
        Whether it was removed: ``False`` for the set of all ranks and for one that is not registered.
    """
    job = _current("remove_process_set()")
    number = process_set.process_set_id
    if number is None or number not in job.process_sets:
        return False
    job.communicator.barrier(name=f"remove_process_set {process_set.ranks}")
    del job.process_sets[number]
    process_set.unregister()
    return True


def _sets_of_all_ranks(communicator: Communicator, sets: Sequence[ProcessSet]) -> list[ProcessSet]:
    """The sets to register, in the same order on all ranks, which differ in their sets if these are communicators'::

    rank 0: ProcessSet(even)    rank 1: ProcessSet(odd)    rank 2: ProcessSet(even)      allgather of ranks
    [0, 2], [1]                 [0, 2], [1]                [0, 2], [1]
    """
    if all(each.mpi_comm is None for each in sets):
        return list(sets)
    launched = list(communicator.launched)
    for each in sets:
        if each.mpi_comm is not None:
            each.ranks = sorted(launched.index(rank) for rank in each.ranks)
    own = np.array([[rank in each.ranks for rank in range(communicator.size)] for each in sets])
    everywhere = communicator.allgather(own[None], name="process sets")
    found: list[ProcessSet] = []
    for mine, members in zip(sets, everywhere.swapaxes(0, 1), strict=True):
        of_ranks = dict.fromkeys(tuple(np.flatnonzero(row).tolist()) for row in members)
        found += [mine if list(ranks) == mine.ranks else ProcessSet(ranks) for ranks in of_ranks]
    return found


def registered_process_sets() -> dict[int, ProcessSet]:
    """Returns the registered process sets by their numbers, that of all ranks first."""
    return {0: global_process_set, **_current("registered_process_sets()").process_sets}


def _check_registered(job: _JobState, sets: Iterable[ProcessSet | Iterable[int]]) -> None:
    known = [list(each.ranks) for each in (global_process_set, *job.process_sets.values())]
    for each in sets:
        ranks = each.ranks if isinstance(each, ProcessSet) else sorted(each)
        if ranks not in known or (isinstance(each, ProcessSet) and each.process_set_id is None):
            raise ConfigError(
                f"init(process_sets=…): this process is initialised already, without a process set of the ranks "
                f"{ranks}: register it with add_process_set(), or call shutdown() first."
            )


def _current(what: str) -> _JobState:
    if _job is None:
        raise NotInitializedError(what)
    return _job


def _end(job: _JobState) -> None:
    _listeners.start()
    with reported(events.LEAVING, job.communicator.launched):
        job.finalize()
    _listeners.stop()


def _start_engine(config: Config, position: Topology, comm: Any) -> tuple[Communicator, Topology, Callable[[], None]]:
    """Starts the engine for this job, which is imported only now that it is chosen."""
    if isinstance(comm, Iterable) and not isinstance(comm, Sequence):  # a set of ranks, or a NumPy array
        comm = [int(rank) for rank in comm]
    name, reason = select(config, position, comm)
    if position.rank == 0:
        _log.info("engine %s: %s", name, reason)
    engine = importlib.import_module(f"choros.comm.engines.{name}")
    if position.size == 1 and not config.elastic:
        return (*engine.start(position, comm), engine.finalize)
    global _finalize
    _finalize = engine.finalize  # also of a rank that does not take part
    with reported(events.INIT, range(position.size)):  # MPI's own start waits for all ranks, and cannot be polled
        return (*engine.start(position, comm), engine.finalize)


@cache
def _install_hooks() -> None:
    """Makes a crash end this rank at once, and a normal end leave the job in order."""
    exit_with_code_of_loss()
    previous, process = sys.excepthook, os.getpid()

    def note_crash(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        global _crashed
        if os.getpid() == process:
            _crashed = True
            _listeners.start()
            events.emit(events.Kind.RANK_CRASHED, kind.__name__)
        previous(kind, error, traceback)

    sys.excepthook = note_crash
    atexit.register(lambda: _leave() if os.getpid() == process else None)  # a forked process is no rank


def _leave() -> None:
    if _crashed:
        merge_after_crash()
        return
    with called_at("the end of its script"):
        shutdown()
    if _finalize is not None:
        _finalize()


def rank() -> int:
    """This process's number, ``0 … size() - 1``. ``NotInitializedError`` before ``init()``."""
    return topology("rank()").rank


def size() -> int:
    """How many processes train together. ``NotInitializedError`` before ``init()``."""
    return topology("size()").size


def local_rank() -> int:
    """This process's number among those on its host. ``NotInitializedError`` before ``init()``."""
    return topology("local_rank()").local_rank


def local_size() -> int:
    """How many processes run on this host. ``NotInitializedError`` before ``init()``."""
    return topology("local_size()").local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this ``local_rank()``."""
    return topology("cross_rank()").cross_rank


def cross_size() -> int:
    """How many hosts have a process of this ``local_rank()``."""
    return topology("cross_size()").cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return topology("is_homogeneous()").is_homogeneous
