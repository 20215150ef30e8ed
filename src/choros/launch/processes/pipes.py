"""Pipes: larger ones, and those through which the frames of ranks on chorosrun's own host pass mpirun by.

::

    wrapper of rank 0 ──► choros-session-JOB/frames.0 ──► chorosrun        named pipes, in a directory
    wrapper of rank 1 ──► choros-session-JOB/frames.1 ──►                  that only this user may enter

mpirun reads a pseudoterminal, 4 KiB at a time, and passes it from thread to thread: more time than all that
wrappers and chorosrun take. Without such a pipe, on several hosts or where chorosrun may open few files, it
forwards the wrapper's standard output.
"""

import fcntl
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from choros.launch.processes.directories import SESSION, temporary
from choros.launch.protocol.wrapper_options import JOB

#: The more a pipe holds, the less often its writer and its reader wait for each other.
_BYTES = 1 << 18
#: The pipes of all ranks for one stream. Linux allows a user 64 MiB of pipes, and makes all further ones small.
_BYTES_OF_STREAM = 1 << 24


def enlarge(pipe: IO[bytes] | int, ranks: int) -> None:
    """Lets the pipe of a rank's stream hold more, if possible; the job has ``ranks`` on this host."""
    size = min(_BYTES, _BYTES_OF_STREAM // ranks)
    if hasattr(fcntl, "F_SETPIPE_SZ") and size >= _BYTES // 4:
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)


@contextmanager
def frame_pipes(session: Path, size: int) -> Iterator[list[int]]:
    """Yields pipes of up to ``size`` ranks, to read unblocked: what ``session`` can have, at most half its files."""
    pipes: list[int] = []
    try:
        for rank in range(size):
            pipe = _create(_path(session, rank))
            if pipe is None:
                break
            enlarge(pipe, size)
            pipes.append(pipe)
        yield pipes
    finally:
        for pipe in pipes:
            os.close(pipe)


def open_frame_pipe(environ: Mapping[str, str], rank: int) -> int | None:
    """Returns the descriptor to which the wrapper of ``rank`` writes frames; ``None`` if there is no pipe for it."""
    path = _path(temporary() / (SESSION + environ.get(JOB, "")), rank)
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # it does not exist, or no process of this host reads it
        return None
    status = os.fstat(pipe)
    if stat.S_ISFIFO(status.st_mode) and status.st_uid == os.geteuid():  # not another user's, on another host
        os.set_blocking(pipe, True)
        return pipe
    os.close(pipe)
    return None


def _create(path: Path) -> int | None:
    try:
        os.mkfifo(path, 0o600)
        # To write, too: reading does not end when a wrapper does, nor before it begins.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        path.unlink(missing_ok=True)
        return None
    if pipe < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        return pipe
    path.unlink()
    os.close(pipe)
    return None


def _path(session: Path, rank: int) -> Path:
    return session / f"frames.{rank}"
