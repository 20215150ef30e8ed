"""An allreduce as a task: the arrays are rewritten before each run, the result is checked after the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from choros.bench.channel import Task

__all__ = ["sum_task"]


def sum_task(arrays: Sequence[Any], size: int, reduce: Callable[[], Sequence[Any]]) -> Task:
    """Returns the task of summing ``arrays`` over ``size`` ranks.

    Every rank writes its arrays before each run, as a backward pass does: data that another core has just written,
    and still caches, cost more to read.

    Args:
        arrays: the arrays that ``reduce`` sums: NumPy's, or tensors with ``fill_``.
        size: the number of ranks.
        reduce: sums the arrays; returns the results.
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
                raise ArithmeticError(f"wrong result: a sum of ones over {size} ranks has elements other than {size}")

    return Task(run, before, check)
