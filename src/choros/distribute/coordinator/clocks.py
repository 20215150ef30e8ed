"""How far workers may be apart: the clocks of a stale-synchronous job.

::

    worker   steps done          may it start its next, with a bound of 2?
      0      █ █ █ █             no: it would be 3 steps ahead of worker 1, which has work
      1      █ ▒                 yes
      2      (lost, or idle)     does not count

After Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013), with one
difference: only workers that have work hold others up. One that is lost, or for which there is none, does not; when it
begins again, it begins at most the bound behind the leader.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

__all__ = ["Clocks"]


@final
class Clocks:
    """How many steps each worker has done, and which of them count.

    Args:
        bound: a worker starts no step while it has done more than this many more than another that has work; ``None``
            lets all go as they can.

    Example:
        >>> clocks = Clocks(bound=0)
        >>> clocks.start("a"), clocks.start("b"), clocks.finish("a")
        (None, None, None)
        >>> clocks.may_start("a")
        False
        >>> clocks.finish("b")
        >>> clocks.may_start("a")
        True
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._done: dict[Hashable, int] = {}
        self._counting: set[Hashable] = set()

    def may_start(self, worker: Hashable) -> bool:
        """Whether the worker may start a step now."""
        if self._bound is None:
            return True
        done = self._done.get(worker, 0)
        return all(done - self._done[other] <= self._bound for other in self._counting)

    def start(self, worker: Hashable) -> None:
        """The worker starts a step."""
        if worker not in self._counting:
            leader = max(self._done.values(), default=0)
            self._done[worker] = max(self._done.get(worker, 0), leader - (self._bound or 0))
            self._counting.add(worker)

    def finish(self, worker: Hashable) -> None:
        """The worker has done its step."""
        self._done[worker] += 1

    def rest(self, worker: Hashable) -> None:
        """There is no work for the worker."""
        self._counting.discard(worker)

    def forget(self, worker: Hashable) -> None:
        """The worker is lost."""
        self._done.pop(worker, None)
        self._counting.discard(worker)
