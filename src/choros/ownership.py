"""Whose a file is: what a process executes or believes must be its user's, and nobody else's to change."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from choros.errors import ConfigError

#: The modes with which others can change a file, and those with which they can also read it.
WRITABLE = 0o022
READABLE = 0o077


def open_directory(path: Path) -> int:
    """The descriptor of a directory of this user, no link; raises an ``OSError`` if it is none. Never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} belongs to another user")
    return descriptor


@contextmanager
def owned_directory(path: Path) -> Iterator[int]:
    """A block with ``open_directory``."""
    descriptor = open_directory(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def overwrite(path: Path, flags: int = 0) -> int:
    """The descriptor of a new or emptied file, whose directory is made if need be; raises an ``OSError`` for links, and
    if the directory is another user's, who could put there what this user would overwrite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with owned_directory(path.parent) as directory:
        return os.open(path.name, flags, 0o666, dir_fd=directory)


def followed(path: str | os.PathLike[str]) -> Path:
    """The path behind all links, as ``realpath``; a ConfigError for one that another user has made where all can write,
    which Linux does not follow either when a file is opened (``fs.protected_symlinks``).
    """
    given = Path(os.path.abspath(path))
    for each in (given, *given.parents):
        if each.is_symlink():
            directory, owner = each.parent.stat(), each.lstat().st_uid
            is_public = directory.st_mode & stat.S_ISVTX and directory.st_mode & stat.S_IWOTH
            if is_public and owner not in (os.geteuid(), directory.st_uid):
                raise ConfigError(
                    f"{each} is a link that another user (uid {owner}) has made in a directory in which all can write: "
                    "nothing is written where it points. Choose another path."
                )
    return Path(os.path.realpath(given))


def problem_with(path: Path, status: os.stat_result, forbidden: int = WRITABLE) -> str:
    """Returns why a file is not this user's alone; empty if it is, or root's, who can do everything anyway.
    ``status`` is of its opened descriptor, so that nothing is put in its place after the check.

        >>> problem_with(Path("/"), os.stat("/"))
        ''
    """
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & forbidden:
        return ""
    alone = "and be readable by nobody else" if forbidden == READABLE else "and be writable by nobody else"
    return (
        f"{path} must belong to this user (uid {os.geteuid()}) {alone}: its owner is {status.st_uid} and its mode "
        f"{stat.S_IMODE(status.st_mode):o}"
    )
