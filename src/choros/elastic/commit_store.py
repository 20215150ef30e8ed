"""Commits on disk: states of a training run, of which the last complete one can always be loaded.

::

    DIRECTORY/commit-00000041.npz    kept, in case the next one is damaged
    DIRECTORY/commit-00000042.npz    the last one
    DIRECTORY/.unfinished.…/         the next one, being written; flushed and renamed (``choros/durable.py``)
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from choros.durable import unfinished
from choros.elastic.state_file import read_state, write_state
from choros.errors import ConfigError
from choros.ownership import WRITABLE, problem_with

__all__ = ["Commit", "CommitStore"]

_log = logging.getLogger("choros")
_NAME = re.compile(r"commit-(\d+)\.npz")
_KEPT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Commit:
    """A commit that has been loaded.

    Attributes:
        number: counts the commits of a directory, from 1.
        state: what was written.
    """

    number: int
    state: Any


@final
class CommitStore:
    """The commits in one directory; one process at a time writes, on a file system that all hosts share.

    Args:
        directory: is created by the first ``write``.

    Example:
        >>> import numpy as np, tempfile
        >>> store = CommitStore(tempfile.mkdtemp())
        >>> store.load_last() is None
        True
        >>> store.write({"weights": [np.ones(2)], "epoch": 3})
        1
        >>> store.load_last().state
        {'weights': [array([1., 1.])], 'epoch': 3}
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def write(self, state: Any) -> int | None:
        """Writes a commit; when this returns, it is on the disk. The last two are kept.

        If the disk is full, a warning says so: training goes on, and the last commit is still there.

        Args:
            state: dicts, lists and tuples of NumPy arrays of any dtype, bytes, numbers, strings, booleans and ``None``.

        Returns:
            The commit's number; ``None`` if the disk is full.

        Raises:
            ConfigError: something else is in the state.
            OSError: it could not be written for another reason; the last commit is still there.
        """
        self.directory.mkdir(mode=0o777 & ~WRITABLE, parents=True, exist_ok=True)
        earlier = self._files()
        number = max(earlier, default=0) + 1
        try:
            with unfinished(self.directory / f"commit-{number:08}.npz") as file:
                write_state(file, state)
                file.chmod(file.stat().st_mode & ~WRITABLE)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            message = "commit %d in %s is not written, training goes on without it: %s."
            _log.warning(message, number, self.directory, error)
            return None
        for old in sorted(earlier)[: 1 - _KEPT]:
            earlier[old].unlink()
        return number

    def load_last(self, *, own: bool = False) -> Commit | None:
        """Returns the last complete commit; ``None`` if there are no commits.

        Args:
            own: it must be a file that only this user can have written, since what it holds is unpickled.

        Raises:
            ConfigError: there are commits, but all of them are damaged, or another user could have written them.
        """
        files = self._files()
        for number in sorted(files, reverse=True):
            try:
                with self._opened(files[number].name, own=own) as file:
                    return Commit(number, read_state(file))
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  (what a damaged file raises depends on where it is damaged)
                _log.warning("%s is damaged, and not loaded: %s: %s", files[number], type(error).__name__, error)
        if files:
            raise ConfigError(
                f"{self.directory} has {len(files)} commits, and all are damaged: restore the directory from a backup, "
                "or remove it to begin the training anew."
            )
        return None

    @contextmanager
    def _opened(self, name: str, *, own: bool) -> Iterator[BinaryIO]:
        """A file of the directory; each step is relative to what was checked, so that nothing takes its place."""
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        flags = os.O_NOFOLLOW if own else 0
        try:
            with open(name, "rb", opener=lambda file, mode: os.open(file, mode | flags, dir_fd=directory)) as file:
                if own:
                    _check_own(self.directory, directory)
                    _check_own(self.directory / name, file.fileno())
                yield file
        finally:
            os.close(directory)

    def _files(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return {int(match[1]): path for match, path in found if match is not None}


def _check_own(path: Path, descriptor: int) -> None:
    problem = problem_with(path, os.fstat(descriptor))
    if problem:
        raise ConfigError(
            f"{problem}. Who can write a commit of hvd.elastic.run can run code in this job. If it is yours: "
            f"chmod go-w {path}. Else choose another --commit-dir."
        )
