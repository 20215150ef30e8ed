"""``CHOROS_AUTOTUNE=1``: the sizes that are fastest here, measured when the job starts. All ranks choose the
candidate whose slowest rank was the fastest. A size that the user has given is not changed.
"""

import csv
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from choros.comm.fusion import chunk_bytes
from choros.comm.primitives import CHUNK_BYTES
from choros.comm.reduction import Reduction
from choros.durable import unfinished
from choros.settings import current
from choros.wording import bytes_text

_log = logging.getLogger("choros")

T = TypeVar("T")
#: An ``MpiCommunicator``, whose module imports this one: it has a ``tuning``, and can ``tune``.
Tuned: TypeAlias = Any

#: What Open MPI's TCP does, without "put", whose requests wait on a connection for all data before them: two ranks that
#: send to each other did it in turn, so that an allreduce took up to twice the time (``benchmarks/forecast``).
TCP_FLAGS = ("OMPI_MCA_btl_tcp_flags", "send,inplace,need-ack,need-csum")

#: How ranks yield a core in Open MPI's calls: on Linux 6.18, ranks that called ``sched_yield`` in a loop kept all other
#: processes from it for minutes, the rank for which they waited among them.
YIELDS = ("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")

#: With three ranks Open MPI's order of a sum depends on its size, with others it does not.
RULES = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(Path(__file__).with_name("three_ranks.conf")),
}

_CHUNKS = tuple(1 << shift for shift in (19, 20, 21, 22, 23))
_BLOCKS = tuple(1 << shift for shift in (17, 18, 19, 20, 21))
_WINDOWS = tuple(1 << shift for shift in (12, 14, 16, 18))
_ROUNDS = 5
#: Shared memory for no message at all.
_NEVER = 1 << 62


@dataclass(frozen=True)
class Tuning:
    """Sizes that affect the speed of an allreduce, never its result; the same on every rank. From ``window_bytes`` on
    messages are reduced in shared memory, not by MPI; ``block_bytes`` are summed, and copied from cache.
    """

    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = 16 << 10
    block_bytes: int = 1 << 20

    def __str__(self) -> str:
        by = (
            "by messages"
            if self.window_bytes == _NEVER
            else f"in shared memory from {bytes_text(self.window_bytes)} on"
        )
        return f"{by}, in chunks of {bytes_text(self.chunk_bytes)}, {bytes_text(self.block_bytes)} at once"


#: The best seconds of this rank for an allreduce of so many bytes with these sizes.
Measurement = tuple[Tuning, int, float]


def tune(communicator: Tuned) -> None:
    """Uses the sizes of the settings, or those that are measured; every rank must call it."""
    config, measurements = current(), list[Measurement]()
    communicator.tune(replace(communicator.tuning, chunk_bytes=chunk_bytes(config.fusion_bytes)))
    measured = config.autotune and communicator.size > 1
    if measured:
        measurements = autotune(communicator, keep_chunks=config.fusion_bytes is not None)
    if communicator.rank != 0:
        return
    _log.info("allreduce: %s (%s).", communicator.tuning, "measured" if measured else "CHOROS_AUTOTUNE=1 measures")
    if measured and config.autotune_log:
        try:
            _write(Path(config.autotune_log), measurements, communicator.tuning)
        except OSError as error:
            _log.warning("CHOROS_AUTOTUNE_LOG=%s cannot be written: %s.", config.autotune_log, error.strerror)


def autotune(communicator: Tuned, megabytes: int = 16, *, keep_chunks: bool = False) -> list[Measurement]:
    """Measures, and from then on uses, the best sizes for ``communicator``; every rank must call it."""
    large = np.ones(megabytes << 18, np.float32)
    measurements: list[Measurement] = []
    if not keep_chunks:
        measurements += _choose(communicator, "chunk_bytes", _CHUNKS, large)
    measurements += _choose(communicator, "block_bytes", _BLOCKS, large)
    # The threshold is below the largest candidate: the winner there also wins above.
    small = [np.ones(size // 4, np.float32) for size in _WINDOWS]
    return measurements + _choose(communicator, "window_bytes", (*_WINDOWS, _NEVER), *small, large)


def _write(path: Path, measurements: Sequence[Measurement], chosen: Tuning) -> None:
    """Writes a CSV file with a row for each measurement, and the chosen sizes as the last row."""
    with unfinished(path) as name, name.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(each.name for each in fields(Tuning)), "array_bytes", "seconds"])
        writer.writerows([*astuple(tuning), size, f"{seconds:.3e}"] for tuning, size, seconds in measurements)
        writer.writerow([*astuple(chosen), "chosen", ""])


def _choose(communicator: Tuned, name: str, sizes: Sequence[int], *arrays: np.ndarray) -> list[Measurement]:
    """Measures the ``sizes`` of one ``name``, and uses the best from then on."""
    candidates = [replace(communicator.tuning, **{name: size}) for size in sizes]
    times = np.full((len(candidates), len(arrays)), np.inf)
    for _ in range(_ROUNDS):
        for row, candidate in enumerate(candidates):
            communicator.tune(candidate)
            for column, array in enumerate(arrays):
                communicator.barrier()
                begin = time.perf_counter()
                communicator.allreduce(array, Reduction.MAX, out=array)
                times[row, column] = min(times[row, column], time.perf_counter() - begin)
    # Sizes differ by orders of magnitude: times are relative to the best one of each size.
    relative = (times / times.min(axis=0)).sum(axis=1)
    communicator.tune(best(candidates, communicator.allgather(relative[np.newaxis]).tolist()))
    return [
        (candidate, array.nbytes, float(seconds))
        for candidate, row in zip(candidates, times, strict=True)
        for array, seconds in zip(arrays, row, strict=True)
    ]


def best(candidates: Sequence[T], times: Sequence[Sequence[float]]) -> T:
    """The candidate whose slowest rank was the fastest; ``times`` has, for each rank, the time of each candidate.

    >>> best(["flat", "window"], [[2.0, 1.5], [2.0, 1.0]])
    'window'
    """
    slowest = [max(column) for column in zip(*times, strict=True)]
    return candidates[slowest.index(min(slowest))]
