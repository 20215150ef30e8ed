"""Ranks as threads of one process: for replicas that are devices of one process, and tests without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Communicator
from choros.comm.reduction import UFUNCS, Array, Reduction
from choros.errors import EngineError

T = TypeVar("T")


class _Board:
    """The shared slots through which the threads of a communicator exchange items."""

    def __init__(self, size: int) -> None:
        self.slots: list[object] = [None] * size
        self.barrier = threading.Barrier(size)
        self.children: dict[tuple[int, ...], _Board] = {}
        self.lock = threading.Lock()

    def exchange(self, rank: int, item: T) -> list[T]:
        """Returns every rank's item once all ranks have stored *and* read them, so that items may be changed then."""
        try:
            self.slots[rank] = item
            self.barrier.wait()
            items = list(self.slots)
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise EngineError("another thread of this communicator has ended with an error.") from None
        return items  # type: ignore[return-value]

    def child(self, ranks: tuple[int, ...]) -> _Board:
        with self.lock:
            return self.children.setdefault(ranks, _Board(len(ranks)))

    def abort(self) -> None:
        """Releases every thread that waits, or will wait, for a thread that has ended."""
        with self.lock:
            self.barrier.abort()
            for child in self.children.values():
                child.abort()


@final
class ThreadCommunicator(Communicator):
    """One thread's view of the ranks of ``run_threads``."""

    engine = "threads"

    def __init__(self, rank: int, board: _Board) -> None:
        super().__init__(rank, range(len(board.slots)))
        self._board = board

    def exchange(self, item: T) -> list[T]:
        """Returns every rank's ``item``, itself; all ranks call it in the same order."""
        return self._board.exchange(self.rank, item)

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack(self._board.exchange(self.rank, header))

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        parts = self._board.exchange(self.rank, buffer.copy())
        buffer[...] = UFUNCS[op].reduce(parts, axis=0)

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        del counts
        return np.concatenate(self._board.exchange(self.rank, send.copy()))

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        buffer[...] = self._board.exchange(self.rank, buffer.copy())[root]

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        del receive_counts
        parts = np.split(send, np.cumsum(send_counts))[: self.size]
        return np.concatenate([theirs[self.rank] for theirs in self._board.exchange(self.rank, parts)])

    def _split(self, ranks: Sequence[int]) -> ThreadCommunicator | None:
        if self.rank not in ranks:
            return None
        return ThreadCommunicator(list(ranks).index(self.rank), self._board.child(tuple(ranks)))


def run_threads(function: Callable[[ThreadCommunicator], T], size: int) -> list[T]:
    """Calls ``function`` with its communicator on ``size`` threads; the first error is raised, and ends the others.

    >>> run_threads(lambda communicator: int(communicator.allreduce(communicator.rank, Reduction.SUM)), 3)
    [3, 3, 3]
    """
    board = _Board(size)

    def rank_main(rank: int) -> T:
        communicator = ThreadCommunicator(rank, board)
        try:
            return function(communicator)
        except BaseException:
            board.abort()
            raise
        finally:
            communicator.close()

    with ThreadPoolExecutor(size, thread_name_prefix="choros-rank") as executor:
        futures = [executor.submit(rank_main, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: type(error) is EngineError):
        raise error
    return [future.result() for future in futures]
