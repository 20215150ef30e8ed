"""Processor time and signal handling of a rank that waits for another in a collective."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from choros.comm import Communicator, Reduction, global_process_set
from choros.parallel.objects import broadcast_object

#: The time that ranks wait, and the share of a core that they may use: in a quiet machine 0.02; all of it if they spin.
SECONDS, SHARE = 0.5, 0.3


def collectives(communicator: Communicator) -> dict[str, Callable[[], object]]:
    rows = np.ones((6 * communicator.size, 1000), np.float32)
    return {
        "allreduce": lambda: communicator.allreduce(rows, Reduction.SUM),
        "allgather": lambda: communicator.allgather(rows),
        "broadcast": lambda: communicator.broadcast(rows),
        "reducescatter": lambda: communicator.reducescatter(rows),
        "alltoall": lambda: communicator.alltoall(rows),
        "barrier": communicator.barrier,
        "started": lambda: communicator.start("", communicator.allreduce, rows, Reduction.SUM).wait(),
    }


def cpu_seconds() -> float:
    """The processor time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def case_waiting_costs_little() -> None:
    communicator = global_process_set.communicator
    for name, collective in collectives(communicator).items():
        communicator.barrier()
        before = cpu_seconds()
        seconds = 3 * SECONDS if name == "allreduce" else SECONDS
        if communicator.rank == communicator.size - 1:
            time.sleep(seconds)
        collective()
        assert cpu_seconds() - before < SHARE * seconds, name


def case_handlers_of_signals_run_while_a_rank_waits() -> None:
    communicator = global_process_set.communicator
    for number in (signal.SIGTERM, signal.SIGINT):
        with tempfile.TemporaryDirectory() as directory:
            handled = Path(broadcast_object(directory)) / "handled"
            before = signal.signal(number, lambda *_, handled=handled: handled.touch())
            communicator.barrier()
            if communicator.rank == 0:
                threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            else:
                until = time.monotonic() + 60
                while not handled.exists():
                    assert time.monotonic() < until, "the handler did not run in the wait"
                    time.sleep(0.02)
            communicator.allreduce(np.ones(1000))
            signal.signal(number, before)
