"""``CHOROS_AUTOTUNE=1``: the sizes that are fastest here, measured when the job starts.

All ranks measure every candidate together and exchange the times; all choose the candidate whose slowest rank was the
fastest. The choice is the same on every rank, as the numbers are. A size that the user has given is not changed.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from choros.comm.algorithms.algorithm import Tuning
from choros.comm.communicator import Communicator
from choros.comm.reduction import Reduction

__all__ = ["Measurement", "autotune", "best", "write_measurements"]

T = TypeVar("T")
#: Makes a communicator use other sizes; called on every rank with the same ones.
Tune = Callable[[Tuning], None]

_CHUNKS = tuple(1 << shift for shift in (19, 20, 21, 22, 23))
_BLOCKS = tuple(1 << shift for shift in (17, 18, 19, 20, 21))
_WINDOWS = tuple(1 << shift for shift in (12, 14, 16, 18))
_ROUNDS = 5
#: Shared memory for no message at all.
_NEVER = 1 << 62


@dataclass(frozen=True)
class Measurement:
    """The best ``seconds`` of this rank for an allreduce of ``array_bytes`` with the sizes in ``tuning``."""

    tuning: Tuning
    array_bytes: int
    seconds: float


def autotune(
    communicator: Communicator, tuning: Tuning, tune: Tune, megabytes: int = 16, *, keep_chunks: bool = False
) -> tuple[Tuning, list[Measurement]]:
    """Measures, and from then on uses, the best sizes for ``communicator``; every rank must call it.

    Args:
        communicator: of all ranks.
        tuning: the sizes to start from.
        tune: makes the communicator use the given sizes.
        megabytes: the size of the array that chunks are measured on.
        keep_chunks: keep the size of chunks that ``tuning`` has.

    Returns:
        The chosen sizes, and all that were measured.
    """
    large = np.ones(megabytes << 18, np.float32)
    measurements: list[Measurement] = []
    if not keep_chunks:
        chunks = [replace(tuning, chunk_bytes=size) for size in _CHUNKS]
        tuning = _choose(communicator, tune, measurements, chunks, large)
    tuning = _choose(communicator, tune, measurements, [replace(tuning, block_bytes=size) for size in _BLOCKS], large)
    windows = [replace(tuning, window_bytes=size) for size in (*_WINDOWS, _NEVER)]
    # The threshold is below the largest candidate: the winner there also wins above.
    small = [np.ones(size // 4, np.float32) for size in _WINDOWS]
    return _choose(communicator, tune, measurements, windows, *small, large), measurements


def write_measurements(path: Path, measurements: Sequence[Measurement], chosen: Tuning) -> None:
    """Writes a CSV file with a row for each measurement, and the chosen sizes as the last row.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(each.name for each in fields(Tuning)), "array_bytes", "seconds"])
        writer.writerows([*astuple(each.tuning), each.array_bytes, f"{each.seconds:.3e}"] for each in measurements)
        writer.writerow([*astuple(chosen), "chosen", ""])


def _choose(
    communicator: Communicator,
    tune: Tune,
    measurements: list[Measurement],
    candidates: Sequence[Tuning],
    *arrays: np.ndarray,
) -> Tuning:
    times = np.full((len(candidates), len(arrays)), np.inf)
    for _ in range(_ROUNDS):
        for row, candidate in enumerate(candidates):
            tune(candidate)
            for column, array in enumerate(arrays):
                communicator.barrier()
                begin = time.perf_counter()
                communicator.allreduce(array, Reduction.MAX, out=array)
                times[row, column] = min(times[row, column], time.perf_counter() - begin)
    measurements += [
        Measurement(candidate, array.nbytes, float(seconds))
        for candidate, row in zip(candidates, times, strict=True)
        for array, seconds in zip(arrays, row, strict=True)
    ]
    # Sizes differ by orders of magnitude: times are relative to the best one of each size.
    relative = (times / times.min(axis=0)).sum(axis=1)
    chosen = best(candidates, communicator.allgather(relative[np.newaxis]).tolist())
    tune(chosen)
    return chosen


def best(candidates: Sequence[T], times: Sequence[Sequence[float]]) -> T:
    """The candidate whose slowest rank was the fastest.

    Args:
        candidates: the measured alternatives.
        times: for each rank, the time of each candidate.

    Example:
        >>> best(["flat", "window"], [[2.0, 1.5], [2.0, 1.0]])
        'window'
    """
    slowest = [max(column) for column in zip(*times, strict=True)]
    return candidates[slowest.index(min(slowest))]
