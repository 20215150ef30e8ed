"""What the coordinator and the processes of a contender say to each other.

::

    coordinator, choros bench          process 0 of a contender        process 1
      listens on a Unix socket
      starts chorosrun, mpirun, … ─────► connects                        connects       (1)
      ◄──────────── Started ────────────────────────────────────────────────
      ───────────── Welcome: its rank, where the barrier is ─────────────►             (2)
                                         imports, joins its job          likewise
      ◄──────────── Ready ────────────────────────────────────────────────              (3)
      ───────────── Order: a case, how much of it ────────────────────────►             (4)
                                         prepares it if it is new        likewise
                                         ── barrier ── run ── barrier ── run …          (5)
      ◄──────────── Timing ───────────────────────────────────────────────              (6)
      ───────────── Stop ─────────────────────────────────────────────────►             (7)

Between (6) and the next (4) a process blocks in a read, whatever its library would do while it waits: another
contender has the machine. The barrier at (5) is in memory that the processes share, the same one for every
contender: a library's own would favour those whose barrier is good. Whatever goes wrong in a process is
sent in rank of its answer, as ``Failed``.

The channels are those of ``transport``: both ends prove that they know a key. The socket lies in a directory that only
this user can enter.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from choros.bench.figures import Timing
from choros.transport.channel import Channel, ChannelClosed, connect

__all__ = [
    "ADDRESS",
    "KEY",
    "Barrier",
    "Failed",
    "Order",
    "Ready",
    "Started",
    "Stop",
    "Task",
    "Timing",
    "Welcome",
    "serve",
]  # fmt: skip

#: Environment variables of a contender's processes: where the coordinator listens, and the key, in hexadecimal.
ADDRESS, KEY = "CHOROS_BENCH_ADDRESS", "CHOROS_BENCH_KEY"

_CACHE_LINE = 8  # 64-bit words
_SPINS_BEFORE_YIELDING = 200
_BARRIER_SECONDS = 600.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Started:
    """A process has started."""


@dataclass(frozen=True)
class Welcome:
    """The answer to ``Started``: the process' rank among the contender's processes, and the barrier's file."""

    rank: int
    processes: int
    barrier: str


@dataclass(frozen=True)
class Ready:
    """The process has joined its job."""


@dataclass(frozen=True)
class Order:
    """Run ``case``: ``runs`` times, ``units`` of work each."""

    case: Any
    runs: int
    units: int


@dataclass(frozen=True)
class Failed:
    """What went wrong in a process."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """There is nothing more to do."""


@dataclass(frozen=True)
class Task:
    """A case, ready to run.

    Attributes:
        run: does so many units of work; only this is timed.
        before: done before each run, untimed.
        check: called once, after the first run; raises if the result is wrong.
        alone: the contender's other processes have no part in it and are not waited for.
    """

    run: Callable[[int], object]
    before: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None
    alone: bool = False


class Prepare(Protocol):
    """Makes a ``Task`` of a case, in a process that has joined its job; ``None``: it has no part in it."""

    def __call__(self, case: Any, /) -> Task | None:
        """Prepares ``case``; what the case before it needed may be dropped."""


@final
class Barrier:
    """Holds the processes of one contender together: a counter each, in a file that all map.

    Args:
        file: of ``size(processes)`` zeros to begin with.
        rank: this process among them.
        processes: how many there are.
    """

    def __init__(self, file: Path, rank: int, processes: int) -> None:
        with file.open("r+b") as opened:
            self._counters = memoryview(mmap.mmap(opened.fileno(), self.size(processes))).cast("q")
        self._mine = rank * _CACHE_LINE
        self._others = [other * _CACHE_LINE for other in range(processes) if other != rank]

    @staticmethod
    def size(processes: int) -> int:
        """How many bytes the file has."""
        return processes * _CACHE_LINE * 8

    def wait(self) -> None:
        """Returns when every process has called it."""
        counters, reached = self._counters, self._counters[self._mine] + 1
        counters[self._mine] = reached
        deadline = time.monotonic() + _BARRIER_SECONDS
        for other in self._others:
            spins = 0
            while counters[other] < reached:
                spins += 1
                if spins > _SPINS_BEFORE_YIELDING:  # there may be more processes than cores
                    os.sched_yield()
                    if time.monotonic() > deadline:
                        raise TimeoutError("another process of this contender did not come")


def serve(join: Callable[[], Prepare], environ: Mapping[str, str] = os.environ) -> None:
    """What a process of a contender does: it joins its job, then does what it is told until there is no more.

    Args:
        join: imports and initialises the contender's library.
        environ: says where the coordinator listens.
    """
    coordinator = _connect(environ)
    try:
        coordinator.send(Started())
        welcome: Welcome = coordinator.receive()
        prepare = join()
        barrier = Barrier(Path(welcome.barrier), welcome.rank, welcome.processes)
        coordinator.send(Ready())
        _serve_orders(coordinator, prepare, barrier)
    except ChannelClosed:  # the coordinator is gone
        os._exit(1)
    except Exception as error:
        coordinator.send(Failed(f"{type(error).__name__}: {error}"))
        raise


def _connect(environ: Mapping[str, str]) -> Channel:
    if ADDRESS not in environ:
        sys.exit("This is a part of choros bench, which starts it itself.")
    return connect(environ[ADDRESS], bytes.fromhex(environ[KEY]), "choros bench", _CONNECT_SECONDS)


def _serve_orders(coordinator: Channel, prepare: Prepare, barrier: Barrier) -> None:
    case: Any = None
    task: Task | None = None
    while isinstance(order := coordinator.receive(), Order):
        new = order.case != case
        if new:
            task = None  # gives its memory back before more is asked for
            case, task = order.case, prepare(order.case)
        if task is None:
            coordinator.send(None)
            continue
        timing = _measure(task, order, barrier)
        if new:
            task.check()
        coordinator.send(timing)


def _measure(task: Task, order: Order, barrier: Barrier) -> Timing:
    begins, ends, cpu = [], [], 0.0
    for _ in range(order.runs):
        task.before()
        if not task.alone:
            barrier.wait()
        used = _cpu_seconds()
        begins.append(time.perf_counter())
        task.run(order.units)
        ends.append(time.perf_counter())
        cpu += _cpu_seconds() - used
    return Timing(tuple(begins), tuple(ends), cpu)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
