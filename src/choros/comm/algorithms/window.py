"""Allreduce in memory that the ranks of a host share, and by messages between the owners of a slice on all hosts.

Every rank owns a slice, and reduces that slice of all buffers on its host. For three ranks, each of which can access
all three buffers (``shared_memory.py``)::

                     slice 0   slice 1   slice 2
    buffer of rank 0 [ a0 ]    [ a1 ]    [ a2 ]        (1) barrier: all have written their buffers
    buffer of rank 1 [ b0 ]    [ b1 ]    [ b2 ]        (2) rank r: slice r of its own += slice r of the others
    buffer of rank 2 [ c0 ]    [ c1 ]    [ c2 ]        (3) on several hosts: allreduce of slice r between its owners
                      rank 0    rank 1    rank 2       (4) rank r: slice r of the others = slice r of its own
                     ── reduces this column ──         (5) barrier: all buffers hold the result

Each rank reads and writes as many bytes as its buffer has, as a copy of it would. The result is the same on all ranks,
as each item is summed once, in one order: the owner's, then the others by rank.

Two orders below are chosen for the caches, not for correctness. A rank writes its own buffer first and then those it
has just read: storing to a cache line that another core holds and this one has not read lately cost ten times as much
on the machines measured. A slice is processed by (2) and (4) in blocks that fit the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from choros.comm.algorithms.algorithm import AllreduceAlgorithm
from choros.comm.algorithms.flat import FlatAllreduce
from choros.comm.algorithms.hosts import HostRanks
from choros.comm.algorithms.shared_memory import share
from choros.comm.mpi_requests import wait_for
from choros.comm.reduction import UFUNCS, Reduction
from choros.comm.waiting import LongWait

__all__ = ["Window", "WindowAllreduce"]

_PAGE = 4096
_KNOWN_BUFFERS = 256
#: Ranks reduce a buffer of this size in less time than ``wait_until`` spins.
_BRIEF_BYTES = 1 << 19


@final
class Window:
    """Shared memory of the ranks of a host: equally many bytes for each.

    Attributes:
        parts: the memory of each rank.
    """

    def __init__(self, host: MPI.Intracomm, nbytes: int) -> None:
        """Every rank of ``host`` must create it; an ``OSError``, on all of them, says that there is no memory."""
        self._host = host
        nbytes = -(-nbytes // _PAGE) * _PAGE
        self.parts = share(host, nbytes)
        self._mine = self.parts[host.Get_rank()]
        self._address = _address(self._mine)

    @property
    def mine(self) -> NDArray[np.uint8]:
        """This rank's memory."""
        return self._mine

    def offset_of(self, address: int) -> int | None:
        """The offset of ``address`` in this rank's memory; ``None`` if it is outside."""
        offset = address - self._address
        return offset if 0 <= offset < self._mine.nbytes else None

    def barrier(self, *, brief: bool = False, describe: Callable[[], LongWait] | None = None) -> None:
        """Waits for all ranks of the host; makes all earlier writes visible to all of them.

        Args:
            brief: the ranks arrive within microseconds, so a blocking call, which spins, is faster than polling.
            describe: returns the wait, to report it.
        """
        if brief:
            self._host.Barrier()
        else:
            wait_for(self._host.Ibarrier(), describe=describe)


def _address(array: NDArray[Any]) -> int:
    try:
        address: int = MPI.Get_address(array)  # takes a tenth of the time
    except (BufferError, TypeError, ValueError):  # its rows are apart, or its dtype is no C type, as bfloat16
        address = array.__array_interface__["data"][0]
    return address


@final
class WindowAllreduce(AllreduceAlgorithm):
    """Allreduce of buffers in a window of the rank's host; see the module's docstring.

    Attributes:
        block_bytes: a rank sums this many bytes before it copies them to the others.
    """

    def __init__(
        self,
        host: MPI.Intracomm,
        owners: MPI.Intracomm | None,
        ranks: HostRanks,
        block_bytes: int,
        describe: Callable[[], LongWait] | None = None,
    ) -> None:
        """Creates the algorithm for the ranks of this host.

        Args:
            host: the ranks of this host.
            owners: the ranks of all hosts that own the same slice as this one (step 3); ``None`` if this rank owns no
                slice, or there is only one host.
            ranks: the ranks over which slices are distributed.
            block_bytes: see above.
            describe: returns the wait for the others, to report it.
        """
        self._host = host
        self._rank = host.Get_rank()
        self._ranks = ranks
        self._between = FlatAllreduce(owners) if owners is not None else None
        self._describe = describe
        self.block_bytes = block_bytes
        self._windows: list[Window] = []
        self._known: dict[tuple[int, int, np.dtype[np.generic]], tuple[Window, NDArray[Any], list[NDArray[Any]]]] = {}

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this rank in a new window; every rank of the host must request the same size.

        Raises:
            OSError: there is no shared memory; on every rank of the host.
        """
        window = Window(self._host, nbytes)
        self._windows.append(window)
        return window.mine[:nbytes]

    def holds(self, buffer: NDArray[Any]) -> bool:
        """Whether ``buffer`` is in memory from ``allocate``."""
        address = _address(buffer)
        return any(window.offset_of(address) is not None for window in self._windows)

    def allreduce(self, buffer: NDArray[Any], op: Reduction) -> None:
        """See ``AllreduceAlgorithm``; ``buffer`` is at the same offset in all ranks' windows."""
        window, own, others = self._views(_address(buffer), buffer.size, buffer.dtype)
        # All ranks have agreed on this collective: for a small buffer the others are microseconds away.
        brief = buffer.nbytes <= _BRIEF_BYTES
        window.barrier(brief=brief, describe=self._describe)
        if own.size:
            self._reduce(own, others, UFUNCS[op], op)
        window.barrier(brief=brief, describe=self._describe)

    def _views(
        self, address: int, items: int, dtype: np.dtype[np.generic]
    ) -> tuple[Window, NDArray[Any], list[NDArray[Any]]]:
        """The slice this rank owns, in its own memory and in the others'; cached, as buffers recur every step."""
        key = (address, items, dtype)
        if key not in self._known:
            if len(self._known) >= _KNOWN_BUFFERS:
                self._known.clear()
            window, begin = next((w, offset) for w in self._windows if (offset := w.offset_of(address)) is not None)
            start, stop = self._ranks.slice_of(self._rank, items)
            part = slice(begin + start * dtype.itemsize, begin + stop * dtype.itemsize)
            others = [memory[part].view(dtype) for rank, memory in enumerate(window.parts) if rank != self._rank]
            self._known[key] = window, window.mine[part].view(dtype), others
        return self._known[key]

    def _reduce(self, own: NDArray[Any], others: list[NDArray[Any]], ufunc: np.ufunc, op: Reduction) -> None:
        block = max(1, self.block_bytes // own.itemsize)
        for start in range(0, own.size, block):
            part = slice(start, start + block)
            for other in others:
                ufunc(own[part], other[part], out=own[part])
            if self._between is None:
                _copy_to(own[part], [other[part] for other in others])
        if self._between is not None:
            self._between.allreduce(own, op)
            _copy_to(own, others)

    def close(self) -> None:
        """Releases all windows."""
        self._windows.clear()
        self._known.clear()


def _copy_to(own: NDArray[Any], others: list[NDArray[Any]]) -> None:
    for other in others:
        other[...] = own
