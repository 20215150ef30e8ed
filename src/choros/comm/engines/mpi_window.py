"""Reductions in memory that the ranks of a host share, and by messages between the owners of a slice on all hosts.
Each item is summed once, in one order, so the result is the same on all ranks::

                     slice 0   slice 1   slice 2
    buffer of rank 0 [ a0 ]    [ a1 ]    [ a2 ]        (1) barrier: all have written their buffers
    buffer of rank 1 [ b0 ]    [ b1 ]    [ b2 ]        (2) rank r: slice r of its own = the sum of all slices r
    buffer of rank 2 [ c0 ]    [ c1 ]    [ c2 ]        (3) on several hosts: allreduce of slice r between its owners
                      rank 0    rank 1    rank 2       (4) rank r: slice r of the others = slice r of its own
                     ── reduces this column ──         (5) barrier: all buffers hold the result

A reducescatter is (1), (2) and (5); in it a rank's own slice, and the sum, are where the caller has them. The order is
that of Open MPI's messages, so that a sum's bits do not depend on how arrays are cut into messages, nor on who sums.

For the caches, a rank writes its own buffer before those it has just read: storing to a line that another core
holds cost ten times as much. For them, too, (2) and (4) process a slice in blocks that fit the second-level cache.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from choros.comm.reduction import UFUNCS, Array, DType, Reduction
from choros.comm.waiting import Awaited, wait_until
from choros.topology import shard_range


@dataclass(frozen=True)
class HostRanks:
    """The number of ranks of each host. The smallest is the number of slices, so each host has an owner for each."""

    sizes: tuple[int, ...]

    @property
    def slices(self) -> int:
        """The number of slices of a buffer."""
        return min(self.sizes)

    @property
    def shared(self) -> bool:
        """Whether any two ranks share a host."""
        return max(self.sizes) > 1

    @classmethod
    def of(cls, leaders: Sequence[int]) -> HostRanks:
        """Counts the ranks of each host, given one number per rank that only ranks of one host share.

        >>> HostRanks.of([0, 0, 2, 2, 2])
        HostRanks(sizes=(2, 3))
        """
        return cls(tuple(list(leaders).count(leader) for leader in dict.fromkeys(leaders)))

    def slice_of(self, local_rank: int, items: int) -> tuple[int, int]:
        """The first item of the slice that a rank owns, and the one after its last.

        >>> ranks = HostRanks((3, 2))
        >>> [ranks.slice_of(rank, 7) for rank in range(3)]
        [(0, 4), (4, 7), (7, 7)]
        """
        if local_rank >= self.slices:
            return items, items
        return shard_range(items, local_rank, self.slices)


_PAGE = 4096
_KNOWN_BUFFERS = 256
#: Ranks reduce a buffer of this size in less time than ``wait_until`` spins.
_BRIEF_BYTES = 1 << 19
#: Open MPI's own segments, in the directory that chorosrun has chosen because it has room for them.
_SEGMENTS = re.compile(r"/\S*/choros-job-\w+/sm_segment\.\S+")
_ZEROS = 1 << 20


def _address(array: Array) -> int:
    try:
        address: int = MPI.Get_address(array)  # takes a tenth of the time
    except (BufferError, TypeError, ValueError):  # its rows are apart, or its dtype is no C type, as bfloat16
        address = array.__array_interface__["data"][0]
    return address


@final
class WindowReduction:
    """Reductions of buffers in windows, memory that the ranks of a host share; see the module's docstring."""

    def __init__(
        self,
        host: MPI.Intracomm,
        between_hosts: Callable[[Array, Reduction], None] | None,
        ranks: HostRanks,
        block_bytes: int,
        describe: Callable[[], Awaited],
    ) -> None:
        """``between_hosts`` reduces the slice that this rank owns (step 3); ``None``: it has none, or one host."""
        self._host = host
        self._rank = host.Get_rank()
        self._ranks = ranks
        self._between_hosts = between_hosts
        self._describe = describe
        self.block_bytes = block_bytes
        #: Where this rank's memory in each window begins and ends, and the memory of all ranks.
        self._windows: list[tuple[int, int, list[NDArray[np.uint8]]]] = []
        self._known: dict[tuple[int, int, DType], list[Array]] = {}

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of this rank in a new window, of the same size on every rank; an ``OSError`` is raised on all."""
        parts = share(self._host, -(-nbytes // _PAGE) * _PAGE)
        mine = parts[self._rank]
        begin = _address(mine)
        self._windows.append((begin, begin + mine.nbytes, parts))
        return mine[:nbytes]

    def holds(self, buffer: Array) -> bool:
        """Whether ``buffer`` is in memory from ``allocate``."""
        address = _address(buffer)
        return any(begin <= address < end for begin, end, _ in self._windows)

    def allreduce(self, buffer: Array, op: Reduction) -> None:
        """Reduces ``buffer``, at the same offset in all ranks' windows, in place with SUM, MIN, MAX or PRODUCT."""
        start, stop = self._ranks.slice_of(self._rank, buffer.size)
        with self._between_barriers(buffer) as parts:
            if start < stop:
                self._reduce([part[start:stop] for part in parts], op)

    def reducescatter(self, out: Array, own: Array, buffer: Array, counts: Sequence[int], op: Reduction) -> None:
        """Reduces ``own``, and this rank's part of the others' ``buffer``, into ``out``; all ranks share this host."""
        start = sum(counts[: self._rank])
        with self._between_barriers(buffer) as parts:
            slices = [part[start : start + own.size] for part in parts]
            slices[self._rank] = own
            for *block, result in self._blocks([*slices, out]):
                _combine(block, UFUNCS[op], result)

    @contextmanager
    def _between_barriers(self, buffer: Array) -> Iterator[list[Array]]:
        """A context in which all ranks are; gives ``buffer`` in the memory of each."""
        parts = self._parts_of(buffer)
        # All ranks have agreed on this collective: for a small buffer the others are microseconds away.
        brief = buffer.nbytes <= _BRIEF_BYTES
        self._barrier(brief=brief)
        with np.errstate(all="ignore"):  # an error on one rank would let the others wait
            yield parts
        self._barrier(brief=brief)

    def _barrier(self, *, brief: bool) -> None:
        """Waits for all ranks; makes earlier writes visible. A ``brief`` wait spins in MPI, faster than polling."""
        if brief:
            self._host.Barrier()
        else:
            wait_until(self._host.Ibarrier().Test, describe=self._describe)

    def _parts_of(self, buffer: Array) -> list[Array]:
        """``buffer`` in the memory of each rank; cached, as buffers recur every step."""
        address = _address(buffer)
        key = (address, buffer.size, buffer.dtype)
        if key not in self._known:
            if len(self._known) >= _KNOWN_BUFFERS:
                self._known.clear()
            start, parts = next((begin, parts) for begin, end, parts in self._windows if begin <= address < end)
            part = slice(address - start, address - start + buffer.nbytes)
            self._known[key] = [memory[part].view(buffer.dtype) for memory in parts]
        return self._known[key]

    def _blocks(self, parts: Sequence[Array]) -> Iterator[list[Array]]:
        items = max(1, self.block_bytes // parts[0].itemsize)
        for start in range(0, parts[0].size, items):
            yield [part[start : start + items] for part in parts]

    def _reduce(self, parts: Sequence[Array], op: Reduction) -> None:
        """Reduces the slice that this rank owns in its own memory, and copies it to that of the others."""
        for block in self._blocks(parts):
            _combine(block, UFUNCS[op], block[self._rank])
            if self._between_hosts is None:
                self._copy_to_others(block)
        if self._between_hosts is not None:
            self._between_hosts(parts[self._rank], op)
            self._copy_to_others(parts)

    def _copy_to_others(self, parts: Sequence[Array]) -> None:
        for rank, part in enumerate(parts):
            if rank != self._rank:
                part[...] = parts[self._rank]

    def close(self) -> None:
        """Releases all windows."""
        self._windows.clear()
        self._known.clear()


def _combine(parts: Sequence[Array], ufunc: np.ufunc, out: Array) -> None:
    """Combines the ranks' ``parts`` as Open MPI's algorithms do, which combine pairs of neighbours::

        0 1 2 3 4    those beyond a power of two first    (0 1) 2 3 4
                     then all, until one is left          ((0 1) 2) (3 4)

    >>> numbers = [np.array([text], object) for text in "abcde"]
    >>> _combine(numbers, np.frompyfunc(lambda a, b: f"({a}{b})", 2, 1), numbers[0])
    >>> numbers[0][0]
    '(((ab)c)(de))'
    """
    beyond = len(parts) - (1 << len(parts).bit_length() - 1)
    left = [ufunc(parts[2 * pair], parts[2 * pair + 1]) for pair in range(beyond)] + [*parts[2 * beyond :]]
    while len(left) > 2:
        left = [ufunc(one, other) for one, other in zip(left[::2], left[1::2], strict=True)]
    if len(left) == 2:  # of a host with one rank it is its own
        ufunc(*left, out=out)


def share(host: MPI.Intracomm, nbytes: int) -> list[NDArray[np.uint8]]:
    """Returns the memory of each rank of ``host``; all must call it. If one fails, all raise an ``OSError``.

    It is a memfd or a temporary file, as ``/dev/shm`` is small in containers, and is reserved first: a file that is
    only mapped, as Open MPI's are before ``reserve_segments``, ends a process by SIGBUS when the file system is full.
    A barrier of MPI makes writes visible to the other ranks::

        rank 0                            rank 1
        reserve: memfd, posix_fallocate   reserve
        name ───────── allgather ───────► name            /proc/PID/fd/N, which only processes of this user can open
        map both ◄─── all have mapped? ─► map both        if one of them failed, all get an OSError
    """
    problem, descriptor, name, identity, parts = "", -1, "", (0, 0), []
    try:
        descriptor, name = _reserve(nbytes)
        identity = _identity(descriptor)
    except OSError as error:
        problem = f"rank {host.Get_rank()}: {error}"
    names = host.allgather((name, identity))
    if all(path for path, _ in names):
        try:
            parts = [_map(path, each, nbytes) for path, each in names]
        except OSError as error:
            problem = f"rank {host.Get_rank()}: {error}"
    problems = [each for each in host.allgather(problem) if each]
    if descriptor >= 0:
        os.close(descriptor)
        with suppress(OSError):  # a memfd has no file
            os.unlink(name)
    if problems:
        raise OSError("; ".join(problems))
    return parts


def _reserve(nbytes: int) -> tuple[int, str]:
    """Returns the descriptor of ``nbytes`` bytes that cannot run out any more, and the name by which others open it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("choros", os.MFD_CLOEXEC)
        name = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        descriptor, name = tempfile.mkstemp(prefix="choros-")
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            for start in range(0, nbytes, _ZEROS):
                os.write(descriptor, bytes(min(_ZEROS, nbytes - start)))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, name


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _map(name: str, identity: tuple[int, int], nbytes: int) -> NDArray[np.uint8]:
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(descriptor) != identity:
            raise OSError(f"{name} is of another process: ranks see different processes, as in containers of their own")
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)


def reserve_segments() -> None:
    """Reserves Open MPI's segments that this process has mapped; an ``OSError`` if there is no room any more."""
    with suppress(FileNotFoundError):  # not on Linux; or a segment that its rank has removed
        for name in sorted(set(_SEGMENTS.findall(Path("/proc/self/maps").read_text(errors="replace")))):
            with open(name, "rb+") as segment:
                os.posix_fallocate(segment.fileno(), 0, os.fstat(segment.fileno()).st_size)
