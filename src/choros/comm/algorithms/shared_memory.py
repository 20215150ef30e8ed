"""Memory that the ranks of a host share, outside MPI; a barrier of MPI makes writes visible to the other ranks. It is
a memfd or a temporary file, as ``/dev/shm`` is small in containers, and is reserved first: a file that is only
mapped, as Open MPI's are before ``reserve_segments``, ends a process by SIGBUS when the file system is full::

    rank 0                            rank 1
    reserve: memfd, posix_fallocate   reserve
    name ───────── allgather ───────► name            /proc/PID/fd/N, which only processes of this user can open
    map both ◄─── all have mapped? ─► map both        if one of them failed, all get an OSError
"""

import mmap
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

#: Open MPI's own segments, in the directory that chorosrun has chosen because it has room for them.
_SEGMENTS = re.compile(r"/\S*/choros-job-\w+/sm_segment\.\S+")

_ZEROS = 1 << 20


def share(host: MPI.Intracomm, nbytes: int) -> list[NDArray[np.uint8]]:
    """Returns the memory of each rank of ``host``; all must call it. If one fails, all raise an ``OSError``."""
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
