"""The clocks of a stale-synchronous job: they bound how far ahead of each other workers may be.

::

    worker   steps done          may it start the next one, with a bound of 2?
      0      █ █ █ █             no: it would be 3 steps ahead of worker 1, which is active
      1      █ ▒                 yes
      2      (lost or idle)      is not counted

After Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013), with one
difference: only active workers block others. A lost or idle worker does not; when it becomes active again, it starts
at most the bound behind the worker with the most steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

__all__ = ["Clocks"]


@final
class Clocks:
    """The number of steps each worker has done, and the set of active workers.

    Args:
        bound: a worker may not start a step while it is more than this many steps ahead of an active worker; ``None``
            sets no bound.

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
        self._active: set[Hashable] = set()

    def may_start(self, worker: Hashable) -> bool:
        """Returns whether the worker may start a step now."""
        if self._bound is None:
            return True
        done = self._done.get(worker, 0)
        return all(done - self._done[other] <= self._bound for other in self._active)

    def start(self, worker: Hashable) -> None:
        """Records that the worker starts a step."""
        if worker not in self._active:
            most = max(self._done.values(), default=0)
            self._done[worker] = max(self._done.get(worker, 0), most - (self._bound or 0))
            self._active.add(worker)

    def finish(self, worker: Hashable) -> None:
        """Records that the worker has finished its step."""
        self._done[worker] += 1

    def mark_idle(self, worker: Hashable) -> None:
        """Records that no work is available for the worker."""
        self._active.discard(worker)

    def forget(self, worker: Hashable) -> None:
        """Removes a worker that is lost."""
        self._done.pop(worker, None)
        self._active.discard(worker)
