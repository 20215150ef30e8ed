"""Files that are complete at any time: written beside the last ones, flushed to the disk, then renamed.

::

    DIRECTORY/NAME                          the last complete one, until one step replaces it
    DIRECTORY/.unfinished.HOST.x7f2/NAME    being written; the directory is locked while its process lives
                                      │
                                      └─ 1 flushed   2 renamed to DIRECTORY/NAME   3 DIRECTORY is flushed

Whatever ends the process, or the machine, in between: DIRECTORY/NAME is the last complete one. What killed
processes leave behind, the next write in the directory removes; not what has such a name because another user, who
can write in DIRECTORY, has renamed it: the directory's mode, which only its owner can set, is one that no other has.
"""

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from choros import durations
from choros.ownership import followed, owned_directory

_PREFIX = ".unfinished."
#: The mode of a directory made here: its sticky bit has no effect, as no other user can enter it.
_MODE = 0o1700
#: The former content of a directory whose name a file system cannot exchange in one step.
_FORMER = ".former"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def unfinished(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A block that writes a file or directory under the name it gets; if it succeeds, this replaces ``path``.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.txt"
    >>> with unfinished(path) as name:
    ...     _ = name.write_text("weights")
    ...     path.exists()
    False
    >>> path.read_text()
    'weights'
    """
    final = followed(path)
    if is_special(Path(path)):  # whose name behind the links may be that of no file
        yield Path(path)
        return
    with workplace(final.parent) as directory:
        name = directory / final.name
        yield name
        flush(name)
        replace(name, final)


def is_special(path: Path) -> bool:
    """Whether it is a device, a pipe or an open file, as ``/dev/stdout``: what is written there replaces nothing."""
    path = path.parent.resolve() / path.name
    if not path.exists():
        return False
    if path.is_symlink() and not path.is_relative_to("/proc"):
        return is_special(path.parent / path.readlink())
    return path.is_relative_to("/proc") or not (path.is_file() or path.is_dir())


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """A block with its own directory in ``parent``, removed after it; if killed, by the next such block there."""
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_if_abandoned(left)
    directory, lock = _locked(parent)
    with suppress(OSError):  # the file system has no such modes
        os.fchmod(lock, _MODE)
    try:
        yield directory
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
        os.close(lock)


def flush(path: Path) -> None:
    """Waits until a file, or all files of a directory, are on the disk."""
    if path.is_dir():
        for each in path.iterdir():
            flush(each)
    _sync(path)


def replace(new: Path, final: Path) -> None:
    """Gives a flushed file or directory of a ``workplace`` its final name, at once and for good."""
    if new.is_dir() and final.is_dir():
        if not _exchanged(new, final):
            # A process that is killed between these two leaves both to _remove_if_abandoned.
            final.replace(new.with_name(_FORMER))
            new.replace(final)
    else:
        new.replace(final)
    _sync(final.parent)


def discard(path: str | os.PathLike[str]) -> None:
    """Removes a file or directory: at first all of it at once, by its name."""
    with workplace(Path(path).parent) as place:
        Path(path).replace(place / "discarded")


class Numbered:
    """The files or directories of a directory that have a number in their names; the last ``kept`` ones are kept.

    >>> import tempfile
    >>> runs = Numbered(Path(tempfile.mkdtemp()), "run-", kept=1)
    >>> for number in (8, 9):
    ...     with runs.write(number) as path:
    ...         path.mkdir()
    >>> [path.name for path in runs.complete().values()]
    ['run-9']
    """

    def __init__(self, directory: Path, prefix: str, suffix: str = "", *, digits: int = 1, kept: int) -> None:
        self._directory = directory
        self._name = f"{prefix}{{:0{digits}}}{suffix}"
        self._pattern = re.compile(rf"{re.escape(prefix)}(\d+){re.escape(suffix)}")
        self._kept = kept

    def complete(self) -> dict[int, Path]:
        """Number → path, of each complete one."""
        paths = self._directory.iterdir() if self._directory.is_dir() else ()
        found = ((self._pattern.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in found if match is not None}

    @contextmanager
    def write(self, number: int) -> Iterator[Path]:
        """A block that writes another one, as ``unfinished``; after it, all but the last ones are removed."""
        earlier = self.complete()
        with unfinished(self._directory / self._name.format(number)) as path:
            yield path
        for old in sorted(earlier, reverse=True)[self._kept - 1 :]:
            discard(earlier[old])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # the names in a directory: a few file systems cannot
            raise
    finally:
        os.close(descriptor)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges the names of two directories in one step: on Linux, where the file system can do so."""
    names = (os.fsencode(one), os.fsencode(other))
    try:
        return ctypes.CDLL(None).renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0  # type: ignore[no-any-return]
    except AttributeError:
        return False


def _own_prefix() -> str:
    return f"{_PREFIX}{os.uname().nodename}."


def _locked(parent: Path) -> tuple[Path, int]:
    """Creates a directory, and locks it until the file descriptor is closed, or the process ends."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=parent))
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:  # removed by another process, before it was locked
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # likewise
            os.close(descriptor)
            continue
        except OSError:  # the file system has no locks: no other process can lock it
            return directory, descriptor
        if directory.exists():
            return directory, descriptor
        os.close(descriptor)


def _remove_if_abandoned(directory: Path) -> None:
    """Removes what a process that was killed has left; completes what it had flushed, and was about to rename."""
    # Others may write beside it: each step is relative to the directory that is this user's.
    with suppress(OSError), owned_directory(directory) as descriptor:
        if _was_made_here(descriptor) and _is_abandoned(directory.name, descriptor):
            names = os.listdir(descriptor)
            for name in names if _FORMER in names else ():
                if name != _FORMER and not (final := directory.parent / name).exists():
                    os.rename(name, final, src_dir_fd=descriptor)
            shutil.rmtree(".", ignore_errors=True, dir_fd=descriptor)
            directory.rmdir()


def _was_made_here(descriptor: int) -> bool:
    """Whether it has the mode; one that is empty may have been left before it had."""
    return os.fstat(descriptor).st_mode & 0o1777 == _MODE or not os.listdir(descriptor)


def _is_abandoned(name: str, descriptor: int) -> bool:
    if name.startswith(_own_prefix()):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        else:
            return True
    changed = os.fstat(descriptor).st_mtime
    for _, directories, files, inner in os.fwalk(".", dir_fd=descriptor):
        times = (os.stat(each, dir_fd=inner, follow_symlinks=False).st_mtime for each in (*directories, *files))
        changed = max([changed, *times])
    return time.time() - changed > durations.ABANDONED
