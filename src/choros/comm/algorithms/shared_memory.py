"""Memory that the ranks of a host share, outside MPI.

::

    rank 0                            rank 1
    reserve: memfd, posix_fallocate   reserve
    name ───────── allgather ───────► name            /proc/PID/fd/N, which only processes of this user can open
    map both ◄─── all have mapped? ─► map both        if one of them failed, all get an OSError

Such memory is not taken from ``/dev/shm``, which is small in containers, and all of it is reserved before it is used: a
file that is only mapped ends a process by SIGBUS when the file system is full. Where the kernel has no memfd, a
temporary file is used.

Open MPI's own memory, for its messages, is in files that are only mapped: ``reserve_segments`` reserves it.

A barrier of MPI between writing and reading makes writes visible to other ranks, as its messages do.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

__all__ = ["reserve_segments", "share"]

#: Open MPI's own segments, in the directory that chorosrun has chosen because it has room for them.
_SEGMENTS = re.compile(r"/\S*/choros-job-\w+/sm_segment\.\S+")

_ZEROS = 1 << 20


def share(host: MPI.Intracomm, nbytes: int) -> list[NDArray[np.uint8]]:
    """Returns the memory of each rank of ``host``: ``nbytes`` bytes, which all of them read and write.

    Every rank of ``host`` must call it. The memory is released with the arrays.

    Raises:
        OSError: a rank has too little memory, or the ranks cannot open each other's; on every rank.
    """
    problem, descriptor, name, parts = "", -1, "", []
    try:
        descriptor, name = _reserve(nbytes)
    except OSError as error:
        problem = f"rank {host.Get_rank()}: {error}"
    names = host.allgather(name)
    if all(names):
        try:
            parts = [_map(each, nbytes) for each in names]
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


def _map(name: str, nbytes: int) -> NDArray[np.uint8]:
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)


def reserve_segments(maps: Path = Path("/proc/self/maps")) -> None:
    """Reserves Open MPI's segments that this process has mapped.

    Args:
        maps: the kernel's list of what this process has mapped.

    Raises:
        OSError: there is no room for them any more.
    """
    with suppress(FileNotFoundError):  # not on Linux; or a segment that its rank has removed
        for name in sorted(set(_SEGMENTS.findall(maps.read_text(errors="replace")))):
            with open(name, "rb+") as segment:
                os.posix_fallocate(segment.fileno(), 0, os.fstat(segment.fileno()).st_size)
