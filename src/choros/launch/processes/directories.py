"""A job's own directories, for shared memory and mpirun's files: Open MPI leaves segments when ranks are killed, so
that its last rank, chorosrun or the user's next job finds and removes them. A user holds a lock that the kernel
releases; one without is stale. Others may plant files beside: only what this user owns is used, no link followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from choros import durations
from choros.errors import LaunchError
from choros.launch.protocol.wrapper_options import JOB, OWN_TEMPORARY
from choros.ownership import open_directory, owned_directory
from choros.settings import SESSION_BYTES
from choros.wording import bytes_text

#: The variable with the directory for Open MPI's segments.
VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
#: The prefixes of mpirun's directories and of those for shared memory.
SESSION = "choros-session-"
_MEMORY = "choros-job-"
#: The prefix of a note of a daemon's directory, and the name of such a directory.
_NOTE, _DAEMON = "daemon.", re.compile(r"prted\.\d+")
#: Where shared memory is, and the size of a rank's segment of Open MPI there.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
SEGMENT = 16 << 20
#: The mode of a job's directories. No other user can enter them: the sticky bit only says that they are a job's.
_MODE = 0o1700
#: How many names of a job are tried: another user may take one in the moment in which its directories are created.
_NAMES = 100
_NO_ROOM = (
    f"the job needs a directory in {{}}, which is read-only or has less than {bytes_text(SESSION_BYTES)} left. "
    "Set TMPDIR to another one."
)


class Directory:
    """A directory that this process has locked: while the process lives, no job treats it as stale."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._daemon: Path | None = None

    @classmethod
    def acquire(cls, path: Path) -> Directory | None:
        """Creates ``path`` if needed, and locks it; ``None`` if that fails or it belongs to another user."""
        for _ in range(3):  # another job may remove it as stale before it is locked
            try:
                path.mkdir(mode=0o700, parents=False, exist_ok=True)
                descriptor = open_directory(path)  # before the lock: another user's would be waited for
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                with contextlib.suppress(OSError):  # the file system has no such modes
                    os.fchmod(descriptor, _MODE)
                if os.fstat(descriptor).st_ino == path.lstat().st_ino:
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
        with contextlib.suppress(OSError):  # not the last rank
            self.path.rmdir()

    def unlock(self) -> None:
        """Ends the use of the directory by this process."""
        os.close(self._descriptor)


def shared_memory(environ: Mapping[str, str], ranks: int, roots: Sequence[Path] = ()) -> Directory | None:
    """Returns this job's directory, with room for all ``ranks``' segments; ``None``: none, or the user set another."""
    if not environ.get(JOB) or VARIABLE in environ:
        return None
    with_room = (root for root in roots or (SHARED_MEMORY, temporary()) if _free(root) >= ranks * SEGMENT)
    directories = (Directory.acquire(root / (_MEMORY + environ[JOB])) for root in with_room)
    return next(filter(None, directories), None)


def segment_suffix(environ: Mapping[str, str], local_rank: int) -> str:
    """Returns the end of the names of a rank's segments; to mpirun, a rank that another one starts has its own job.

    >>> segment_suffix({"PMIX_NAMESPACE": "prterun-host-12@2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 3)
    '0002.0'
    >>> segment_suffix({}, 3)
    '.3'
    """
    _, _, number = environ.get("PMIX_NAMESPACE", "").rpartition("@")
    if not number.isdecimal():
        return f".{local_rank}"
    return f"{int(number):04x}.{environ.get('OMPI_COMM_WORLD_LOCAL_RANK', local_rank)}"


@contextmanager
def job_directories(names: Iterable[str] = ()) -> Iterator[tuple[str, Path]]:
    """Creates a job's directories on this host before others can use its name, and removes them, and those of daemons
    that were killed; yields the job's name, the first of ``names`` that is free, and the directory of mpirun's files.
    """
    if _free(temporary()) < SESSION_BYTES:
        raise LaunchError(_NO_ROOM.format(temporary()))
    for name in names or (os.urandom(6).hex() for _ in range(_NAMES)):
        session = temporary() / (SESSION + name)
        paths = [root / (_MEMORY + name) for root in (SHARED_MEMORY, temporary())] + [session]
        for path in paths:  # at once: the first one shows the name to others, who might take the next
            with contextlib.suppress(OSError):
                path.mkdir(mode=0o700)
        held = {path: directory for path in paths if (directory := Directory.acquire(path)) is not None}
        try:
            if all(path in held or not os.path.lexists(path) for path in paths):
                if session not in held:
                    raise LaunchError(_NO_ROOM.format(temporary()))
                yield name, session
                return
        finally:
            for path in reversed(paths):
                _remove_with_daemons(path)
            for directory in held.values():
                directory.unlock()
    raise LaunchError(
        f"another user of this machine makes directories in {SHARED_MEMORY} or {temporary()} with the name of each job "
        f"that starts. Set TMPDIR to a directory of your own, or ask an administrator to end that."
    )


def _free(root: Path) -> int:
    """Returns the number of bytes that are free on the file system of ``root``; -1 if it does not exist."""
    try:
        status = os.statvfs(root)
    except OSError:
        return -1
    return status.f_bavail * status.f_frsize


def temporary() -> Path:
    """Returns the directory for temporary files, as ``tempfile`` does, whose import takes every rank 10 ms."""
    named = filter(None, map(os.environ.get, (OWN_TEMPORARY, "TMPDIR", "TEMP", "TMP")))
    return next((Path(path) for path in named if os.access(path, os.W_OK | os.X_OK)), Path("/tmp"))  # noqa: S108


def remove_stale(*roots: Path) -> None:
    """Removes the directories of jobs that were killed as a whole, by default from /dev/shm and the temporary one."""
    for root in roots or (SHARED_MEMORY, temporary()):
        for path in (*root.glob(_MEMORY + "*"), *root.glob(SESSION + "*")):
            with contextlib.suppress(OSError), owned_directory(path) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process may have locked it
                status = os.fstat(descriptor)
                # Another process may have removed it; that is a job's new one. Another user may have renamed it, where
                # all can write: one that is not as jobs' are is not theirs.
                if status.st_ino == path.lstat().st_ino and status.st_mode & 0o1777 == _MODE:
                    _remove_with_daemons(path)


def _remove_with_daemons(path: Path) -> None:
    with contextlib.suppress(OSError), owned_directory(path) as descriptor:
        for name in os.listdir(descriptor):
            if name.startswith(_NOTE) and _DAEMON.fullmatch(name.removeprefix(_NOTE)):
                remove_owned(temporary() / name.removeprefix(_NOTE))
    remove_owned(path)


def remove_owned(path: Path) -> None:
    """Removes a directory and its contents, if it belongs to this user and is no link."""
    import shutil  # imports three compression libraries

    with contextlib.suppress(OSError), owned_directory(path) as descriptor:
        shutil.rmtree(".", ignore_errors=True, dir_fd=descriptor)
        path.rmdir()


_GATE_KEY = "gate"


def write_key(session: Path, key: bytes) -> None:
    """Writes the key, complete from the moment when the file exists."""
    path = session / f"{_GATE_KEY}.new"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    path.rename(session / _GATE_KEY)


def wait_for_key(environ: Mapping[str, str]) -> bytes:
    """Returns the key of this job as soon as chorosrun has written it."""
    path = temporary() / (SESSION + environ[JOB]) / _GATE_KEY
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            time.sleep(durations.GATE_KEY)
