"""The messages between the coordinator and the processes of a contender.

::

    coordinator, choros bench          process 0 of a contender        process 1
      listens on a Unix socket
      starts chorosrun, mpirun, … ─────► connects                        connects       (1)
      ◄──────────── Started ────────────────────────────────────────────────
      ───────────── Welcome: its rank, the barrier's file ───────────────►             (2)
                                         imports, joins its job          likewise
      ◄──────────── Ready ────────────────────────────────────────────────              (3)
      ───────────── Order: a case, the number of runs ────────────────────►             (4)
                                         prepares it if it is new        likewise
                                         ── barrier ── run ── barrier ── run …          (5)
      ◄──────────── Timing ───────────────────────────────────────────────              (6)
      ───────────── Stop ─────────────────────────────────────────────────►             (7)

Between (6) and the next (4) a process blocks in a read, so that it uses no CPU while another contender is measured.
The barrier at (5) is in shared memory and the same for every contender: a library's own barrier would favour
libraries with a fast one. A process that fails sends ``Failed`` instead of its answer.

The channels are those of ``transport``: both ends prove that they know a key. The socket is in a directory that only
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
from choros.transport.secret import Key

__all__ = [
    "ADDRESS",
    "COORDINATOR",
    "KEY",
    "PROCESS",
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

#: Environment variables of a contender's processes: the coordinator's address, and the key in hexadecimal.
ADDRESS, KEY = "CHOROS_BENCH_ADDRESS", "CHOROS_BENCH_KEY"
#: The names that both ends of a channel prove.
COORDINATOR, PROCESS = "choros bench", "a process of a contender"

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
    """The process failed."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """The process must end."""


@dataclass(frozen=True)
class Task:
    """A case, ready to run.

    Attributes:
        run: does the given number of units of work; only this is timed.
        before: called before each run, untimed.
        check: called once, after the first run; raises if the result is wrong.
        alone: only one of the contender's processes runs it, so there is no barrier.
    """

    run: Callable[[int], object]
    before: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None
    alone: bool = False


class Prepare(Protocol):
    """Returns the ``Task`` of a case, in a process that has joined its job; ``None`` if the process does not run it."""

    def __call__(self, case: Any, /) -> Task | None:
        """Prepares ``case``; the previous case's data may be released."""


@final
class Barrier:
    """A barrier for the processes of one contender: a counter for each, in a file that all map.

    Args:
        file: a file of ``size(processes)`` bytes, initially zeros.
        rank: the rank of this process.
        processes: the number of processes.
    """

    def __init__(self, file: Path, rank: int, processes: int) -> None:
        with file.open("r+b") as opened:
            self._counters = memoryview(mmap.mmap(opened.fileno(), self.size(processes))).cast("q")
        self._mine = rank * _CACHE_LINE
        self._others = [other * _CACHE_LINE for other in range(processes) if other != rank]

    @staticmethod
    def size(processes: int) -> int:
        """Returns the size of the file in bytes."""
        return processes * _CACHE_LINE * 8

    def wait(self) -> None:
        """Blocks until every process has called it."""
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
                        raise TimeoutError(
                            f"another process of this contender did not reach the barrier in {_BARRIER_SECONDS:.0f} s"
                        )


def serve(join: Callable[[], Prepare], environ: Mapping[str, str] = os.environ) -> None:
    """Runs a process of a contender: joins its job, then serves the coordinator's orders until it sends ``Stop``.

    Args:
        join: imports and initialises the contender's library.
        environ: contains the coordinator's address and key.
    """
    coordinator = _connect(environ)
    try:
        coordinator.send(Started())
        welcome: Welcome = coordinator.receive()
        prepare = join()
        barrier = Barrier(Path(welcome.barrier), welcome.rank, welcome.processes)
        coordinator.send(Ready())
        _serve_orders(coordinator, prepare, barrier)
    except ChannelClosed:  # the coordinator has ended
        os._exit(1)
    except Exception as error:
        coordinator.send(Failed(f"{type(error).__name__}: {error}"))
        raise


def _connect(environ: Mapping[str, str]) -> Channel:
    if ADDRESS not in environ:
        sys.exit("This module is started by choros bench and cannot be run directly. Run: choros bench")
    key = Key(bytes.fromhex(environ[KEY]))
    return connect(environ[ADDRESS], key, PROCESS, COORDINATOR, _CONNECT_SECONDS)


def _serve_orders(coordinator: Channel, prepare: Prepare, barrier: Barrier) -> None:
    case: Any = None
    task: Task | None = None
    while isinstance(order := coordinator.receive(), Order):
        new = order.case != case
        if new:
            task = None  # releases its memory before the next case allocates
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
    usages = (resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
