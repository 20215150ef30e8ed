"""The messages between the coordinator and the processes of a contender, over ``transport``'s channels.

::

    coordinator, choros bench          process 0 of a contender        process 1
      listens on a Unix socket
      starts chorosrun, mpirun, … ─────► connects                        connects       (1)
      ◄──────────── None ───────────────────────────────────────────────────
      ───────────── of its barrier: file, rank, processes ──────────────►             (2)
                                         imports, joins its job          likewise
      ◄──────────── None ─────────────────────────────────────────────────              (3)
      ───────────── a case, the number of runs, the units of each ────────►             (4)
                                         prepares it if it is new        likewise
                                         ── barrier ── run ── barrier ── run …          (5)
      ◄──────────── Timing ───────────────────────────────────────────────              (6)
      ───────────── None ─────────────────────────────────────────────────►             (7)

Between (6) and the next (4) a process blocks in a read: it uses no CPU while another contender is measured. The
barrier at (5) is the same for every contender: a library's own would favour those with a fast one. A process that
fails answers with a text that says why. Only this user can enter the directory of the socket.
"""

import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from choros import durations
from choros.bench.figures import Timing
from choros.transport.channel import Channel, ChannelClosed, connect
from choros.transport.secret import Key

#: Environment variables of a contender's processes: the coordinator's address, and the key in hexadecimal.
ADDRESS, KEY = "CHOROS_BENCH_ADDRESS", "CHOROS_BENCH_KEY"
#: The names that both ends of a channel prove.
COORDINATOR, PROCESS = "choros bench", "a process of a contender"

_CACHE_LINE = 8  # 64-bit words
#: What each process has in the file of the barrier.
BARRIER_BYTES = 8 * _CACHE_LINE
#: There may be more processes than cores, which those that yield for long may keep (``comm/engines/mpi_tuning.py``).
_SPINS_BEFORE_YIELDING, _SPINS_BEFORE_SLEEPING = 200, 2000


@dataclass(frozen=True)
class Task:
    """A case, ready to run; only ``run`` is timed. ``before`` precedes each run and its barrier.
    ``check`` is called once, after the first run, and raises if the result is wrong.
    """

    run: Callable[[int], object]
    before: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None


#: Returns the ``Task`` of a case, in a process that has joined its job, and may release the data of the case before.
Prepare = Callable[[Any], Task]


def barrier_of(file: Path, rank: int, processes: int) -> Callable[[], None]:
    """Returns what blocks until all processes have called it; they map a file with a counter for each, at first 0."""
    with file.open("r+b") as opened:
        counters = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
    mine = rank * _CACHE_LINE
    others = [other * _CACHE_LINE for other in range(processes) if other != rank]

    def wait() -> None:
        counters[mine] = reached = counters[mine] + 1
        deadline = time.monotonic() + durations.BENCH_BARRIER
        for other in others:
            spins = 0
            while counters[other] < reached:
                spins += 1
                if _SPINS_BEFORE_YIELDING < spins <= _SPINS_BEFORE_SLEEPING:
                    os.sched_yield()
                elif spins > _SPINS_BEFORE_SLEEPING:
                    time.sleep(durations.POLL)
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            "another process of this contender did not reach the barrier in "
                            f"{durations.BENCH_BARRIER:.0f} s"
                        )

    return wait


def serve(join: Callable[[], Prepare]) -> None:
    """Runs a process of a contender: joins its job, then serves the coordinator's orders."""
    coordinator = _connect()
    try:
        coordinator.send(None)
        place = coordinator.receive()
        prepare = join()
        barrier = barrier_of(*place)
        coordinator.send(None)
        _serve_orders(coordinator, prepare, barrier)
    except ChannelClosed:  # the coordinator has ended
        os._exit(1)
    except Exception as error:
        coordinator.send(f"{type(error).__name__}: {error}")
        raise


def serve_one_of(*joins: Callable[..., Prepare]) -> None:
    """Serves with the one of ``joins`` that the command line names; its other words are arguments."""
    named = {join.__name__: join for join in joins}
    serve(lambda: named[sys.argv[1]](*sys.argv[2:]))


def _connect() -> Channel:
    if ADDRESS not in os.environ:
        sys.exit("This module is started by choros bench and cannot be run directly. Run: choros bench")
    key = Key(bytes.fromhex(os.environ[KEY]))
    return connect(os.environ[ADDRESS], key, PROCESS, COORDINATOR, durations.BENCH_CONNECT)


def _serve_orders(coordinator: Channel, prepare: Prepare, barrier: Callable[[], None]) -> None:
    case: Any = None
    task: Any = None
    while (order := coordinator.receive()) is not None:
        wanted, runs, units = order
        new = task is None or wanted != case
        if new:
            task = None  # releases its memory before the next case allocates
            case, task = wanted, prepare(wanted)
        timing = _measure(task, runs, units, barrier)
        if new:
            task.check()
        coordinator.send(timing)


def _measure(task: Task, runs: int, units: int, barrier: Callable[[], None]) -> Timing:
    begins, ends, cpu = [], [], 0.0
    for _ in range(runs):
        task.before()
        barrier()
        used = _cpu_seconds()
        begins.append(time.perf_counter())
        task.run(units)
        ends.append(time.perf_counter())
        cpu += _cpu_seconds() - used
    return begins, ends, cpu


def _cpu_seconds() -> float:
    usages = (resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
