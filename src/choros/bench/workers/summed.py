"""An allreduce as a task: written anew before each run, right after the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from choros.bench.channel import Task

__all__ = ["sum_task"]


def sum_task(arrays: Sequence[Any], size: int, reduce: Callable[[], Sequence[Any]]) -> Task:
    """The task of summing ``arrays`` over ``size`` ranks.

    Every rank writes its arrays before each run, as a backward pass does: data that lie fresh in another
    core's cache cost more to read.

    Args:
        arrays: NumPy's, or a tensor with ``fill_``; what ``reduce`` sums.
        size: how many ranks there are.
        reduce: sums them; returns the results.
    """
    results: list[Any] = []
    fills = [array.fill_ if hasattr(array, "fill_") else array.fill for array in arrays]

    def run(units: int) -> None:
        for _ in range(units):
            results[:] = reduce()

    def before() -> None:
        for fill in fills:
            fill(1)

    def check() -> None:
        for result in results:
            if not bool((result == size).all()):
                raise ArithmeticError(f"a sum of ones over {size} ranks is not {size} everywhere")

    return Task(run, before, check)
