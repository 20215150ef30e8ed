"""A job's own directories, for shared memory and for mpirun's files, so that no file outlives its job.

Open MPI leaves its segments in ``/dev/shm`` when ranks are killed. In a separate directory for each job they can be
found and removed: by the last rank that ends, by chorosrun, or, if all were killed at once, by the same user's next
job. Where ``/dev/shm`` is too small, as it may be in a container, they are in the directory for temporary files. A
process that uses a directory holds a lock on it, which the kernel releases when the process ends; a directory without
a lock is stale. On other hosts it notes the name of the directory of mpirun's daemon, which is stale with it.

Others may create what they like beside these directories, in ``/dev/shm`` and ``/tmp``: so only a directory that this
user owns is used or removed, which is checked on its descriptor, and no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from choros.config import SESSION_BYTES
from choros.launch.protocol.wrapper_options import JOB

__all__ = [
    "SESSION",
    "VARIABLE",
    "Directory",
    "remove_owned",
    "remove_shared_memory",
    "remove_stale",
    "reserve_shared_memory",
    "segment_suffix",
    "session_directory",
    "shared_memory",
    "temporary",
]

#: The variable with the directory for Open MPI's segments.
VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
#: The prefixes of mpirun's directories and of those for shared memory.
SESSION = "choros-session-"
_MEMORY = "choros-job-"
#: The prefix of a note of a daemon's directory, and the name of such a directory.
_NOTE, _DAEMON = "daemon.", re.compile(r"prted\.\d+")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
#: Open MPI's segment of a rank.
_SEGMENT = 16 << 20


class Directory:
    """A directory that this process has locked: while the process lives, no job treats it as stale."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._daemon: Path | None = None

    @classmethod
    def acquire(cls, path: Path) -> Directory | None:
        """Creates ``path`` if it does not exist, and locks it.

        Returns ``None`` if that fails or the directory belongs to another user.
        """
        for _ in range(3):  # another job may remove it as stale before it is locked
            try:
                path.mkdir(mode=0o700, parents=False, exist_ok=True)
                descriptor = _opened(path)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                locked, current = os.fstat(descriptor), path.lstat()
                if locked.st_uid == os.geteuid() and locked.st_ino == current.st_ino:
                    return cls(path, descriptor)
            except OSError:
                pass
            os.close(descriptor)
        return None

    def note_daemon(self, path: Path) -> None:
        """Notes that ``path`` belongs to mpirun's daemon, which removes it unless it is killed."""
        if path.parent == temporary() and _DAEMON.fullmatch(path.name):
            self._daemon = self.path / (_NOTE + path.name)
            with contextlib.suppress(OSError):  # no room
                self._daemon.touch()

    def release(self, suffix: str) -> None:
        """Removes a rank's segments, and the directory after the last rank. Other ranks have theirs mapped already."""
        for segment in self.path.glob(f"*{suffix}"):
            segment.unlink(missing_ok=True)
        if self._daemon is not None and list(self.path.glob("*")) == [self._daemon]:
            self._daemon.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError:  # not the last rank
            return

    def remove(self) -> None:
        """Removes the directory and its contents."""
        remove_owned(self.path)
        self.unlock()

    def unlock(self) -> None:
        """Ends the use of the directory by this process."""
        os.close(self._descriptor)


def shared_memory(environ: Mapping[str, str], ranks: int, roots: Sequence[Path] = ()) -> Directory | None:
    """Returns this job's directory for shared memory; ``None`` if there is none, or the user has set another.

    Args:
        environ: the environment, with the name of the job.
        ranks: the number of ranks on this host; there must be room for the segments of all of them.
        roots: where it may be; by default in /dev/shm or in the directory for temporary files.
    """
    if not environ.get(JOB) or VARIABLE in environ:
        return None
    with_room = (root for root in roots or (_SHARED_MEMORY, temporary()) if _free(root) >= ranks * _SEGMENT)
    directories = (Directory.acquire(root / (_MEMORY + environ[JOB])) for root in with_room)
    return next(filter(None, directories), None)


def segment_suffix(environ: Mapping[str, str], local_rank: int) -> str:
    """Returns the end of the names of a rank's segments; to mpirun, a rank that another one starts has its own job.

    Example:
        >>> segment_suffix({"PMIX_NAMESPACE": "prterun-host-12@2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 3)
        '0002.0'
        >>> segment_suffix({}, 3)
        '.3'
    """
    _, _, number = environ.get("PMIX_NAMESPACE", "").rpartition("@")
    if not number.isdecimal():
        return f".{local_rank}"
    return f"{int(number):04x}.{environ.get('OMPI_COMM_WORLD_LOCAL_RANK', local_rank)}"


def reserve_shared_memory(job: str) -> list[Directory]:
    """Creates a job's directories for shared memory on this host, before others can learn the job's name.

    Raises:
        FileExistsError: somebody else has one of this name.
    """
    directories = []
    for path in [root / (_MEMORY + job) for root in (_SHARED_MEMORY, temporary())]:
        directory = Directory.acquire(path)
        if directory is not None:
            directories.append(directory)
        elif os.path.lexists(path):
            raise FileExistsError(path)
    return directories


def remove_shared_memory(job: str) -> None:
    """Removes a job's directories for shared memory on this host, and those of daemons that were killed."""
    for root in (_SHARED_MEMORY, temporary()):
        _remove_with_daemons(root / (_MEMORY + job))


def _free(root: Path) -> int:
    """Returns the number of bytes that are free on the file system of ``root``; -1 if it does not exist."""
    try:
        status = os.statvfs(root)
    except OSError:
        return -1
    return status.f_bavail * status.f_frsize


def temporary() -> Path:
    """Returns the directory for temporary files, as ``tempfile`` does, whose import takes every rank 10 ms."""
    named = filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    return next((Path(path) for path in named if os.access(path, os.W_OK | os.X_OK)), Path("/tmp"))  # noqa: S108


def session_directory(job: str) -> Directory | None:
    """Returns the directory for mpirun's files on this host; ``None`` if it cannot be created, or has no room."""
    if _free(temporary()) < SESSION_BYTES:
        return None
    return Directory.acquire(temporary() / (SESSION + job))


def remove_stale(*roots: Path) -> None:
    """Removes the directories of jobs that were killed as a whole, by default from /dev/shm and the temporary one."""
    for root in roots or (_SHARED_MEMORY, temporary()):
        for path in (*root.glob(_MEMORY + "*"), *root.glob(SESSION + "*")):
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    with contextlib.suppress(OSError), _owned(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process may have locked it
        _remove_with_daemons(path)


def _remove_with_daemons(path: Path) -> None:
    with contextlib.suppress(OSError), _owned(path) as descriptor:
        for name in os.listdir(descriptor):
            if name.startswith(_NOTE) and _DAEMON.fullmatch(name.removeprefix(_NOTE)):
                remove_owned(temporary() / name.removeprefix(_NOTE))
    remove_owned(path)


def remove_owned(path: Path) -> None:
    """Removes a directory and its contents, if it belongs to this user and is no link."""
    import shutil  # imports three compression libraries

    with contextlib.suppress(OSError), _owned(path) as descriptor:
        shutil.rmtree(".", ignore_errors=True, dir_fd=descriptor)
        path.rmdir()


@contextmanager
def _owned(path: Path) -> Iterator[int]:
    """The descriptor of a directory of this user; raises an ``OSError`` if it is none."""
    descriptor = _opened(path)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
