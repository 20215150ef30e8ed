"""Whose a file is: what a process executes or believes must be its user's, and nobody else's to change."""

import os
import stat
from pathlib import Path

#: The modes with which others can change a file, and those with which they can also read it.
WRITABLE = 0o022
READABLE = 0o077


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
