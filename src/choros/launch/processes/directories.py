"""A job's own directories, for shared memory and for mpirun's files: nothing of a job stays behind.

Open MPI leaves its segments in ``/dev/shm`` when ranks are killed. In a directory of the job's own they can be
found and removed: by the last rank that leaves, by chorosrun, and, should everything have been killed at once,
by the next job of the same user. A process that uses a directory holds a lock on it, which the kernel takes away
with the process; a directory that no process holds is stale.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from choros.launch.protocol.wrapper_options import JOB

__all__ = ["SESSION", "VARIABLE", "Directory", "remove_stale", "session_directory", "shared_memory", "temporary"]

#: The variable that tells Open MPI where to put its segments.
VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
#: How mpirun's directories begin, and those for shared memory.
SESSION = "choros-session-"
_MEMORY = "choros-job-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


class Directory:
    """A directory that we hold: as long as this process lives, no job takes it for stale."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def hold(cls, path: Path) -> Directory | None:
        """Makes ``path`` unless it is there, and holds it; ``None`` if that is impossible or it is not ours."""
        for _ in range(3):  # it may be taken for stale between the two
            try:
                path.mkdir(mode=0o700, parents=False, exist_ok=True)
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                held, there = os.fstat(descriptor), path.lstat()
                if held.st_uid == os.getuid() and held.st_ino == there.st_ino:
                    return cls(path, descriptor)
            except OSError:
                pass
            os.close(descriptor)
        return None

    def leave(self, local_rank: int) -> None:
        """A rank is done with it: the last one removes it. The others have mapped what they need."""
        for segment in self.path.glob(f"*.{local_rank}"):
            segment.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError:  # not the last one
            return

    def remove(self) -> None:
        """Removes it with all that is in it."""
        _remove_tree(self.path)
        os.close(self._descriptor)


def shared_memory(environ: Mapping[str, str], root: Path = _SHARED_MEMORY) -> Directory | None:
    """This job's directory for shared memory; ``None`` where there is no such place or the user named another."""
    if not environ.get(JOB) or VARIABLE in environ or not root.is_dir():
        return None
    return Directory.hold(root / (_MEMORY + environ[JOB]))


def temporary() -> Path:
    """Where temporary files go, by the rules of ``tempfile``, whose import takes 10 ms: of every rank, too."""
    named = filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    return next((Path(path) for path in named if os.access(path, os.W_OK | os.X_OK)), Path("/tmp"))  # noqa: S108


def session_directory(job: str) -> Directory | None:
    """The directory for what mpirun keeps on this host."""
    return Directory.hold(temporary() / (SESSION + job))


def remove_stale(*roots: Path) -> None:
    """Removes the directories of jobs that were killed as a whole, from the usual places by default."""
    for root in roots or (_SHARED_MEMORY, temporary()):
        for path in (*root.glob(_MEMORY + "*"), *root.glob(SESSION + "*")):
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(path)
    except OSError:  # another process holds it
        return
    finally:
        os.close(descriptor)


def _remove_tree(path: Path) -> None:
    import shutil  # with three compression libraries

    shutil.rmtree(path, ignore_errors=True)
