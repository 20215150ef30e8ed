"""Process sets whose members are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from choros.comm import Communicator, ProcessSet
from choros.comm.engines.threads import run_threads

T = TypeVar("T")


def on_threads(size: int, function: Callable[[ProcessSet], T]) -> list[T]:
    """Calls ``function`` on each of ``size`` ranks with the process set of all of them; returns the results."""

    def rank_main(communicator: Communicator) -> T:
        process_set = ProcessSet(communicator.ranks)
        process_set.register(0, communicator.ranks, communicator)
        return function(process_set)

    return run_threads(rank_main, size)
