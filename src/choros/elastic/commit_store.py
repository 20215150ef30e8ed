"""Commits on disk: states of a training run, of which the last complete one can always be loaded.

::

    DIRECTORY/commit-00000041.npz    kept, in case the next one is damaged
    DIRECTORY/commit-00000042.npz    the last one
    DIRECTORY/.unfinished.…/         the next one, being written; flushed and renamed (``choros/durable.py``)

A file is NumPy's ``.npz``: a zip archive, with a checksum for each member. Nothing in it is unpickled::

    0.npy, 1.npy, …    the arrays and bytes
    state.npy          JSON: the structure, the small values, and what each array is

    {"w": bfloat16 array, "best": None}   ►   {"dict": [["w", {"array": ["0", "bfloat16"]}], ["best", null]]}
"""

import errno
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from choros.durable import Numbered
from choros.errors import ConfigError
from choros.ownership import WRITABLE, problem_with

_log = logging.getLogger("choros")
_KEPT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_STATE = "state"
_PLAIN = (bool, int, float, str, type(None))


@final
class CommitStore:
    """The commits in one directory on a file system that all hosts share; one process at a time writes.

    >>> import numpy as np, tempfile
    >>> store = CommitStore(tempfile.mkdtemp())
    >>> store.load_last() is None
    True
    >>> store.write({"weights": [np.ones(2)], "epoch": 3})
    1
    >>> store.load_last()
    {'weights': [array([1., 1.])], 'epoch': 3}
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._files = Numbered(self.directory, "commit-", ".npz", digits=8, kept=_KEPT)
        #: The number of the last one that was seen; 0: none yet.
        self._last = 0

    @property
    def has_commits(self) -> bool:
        """Whether there is a complete one."""
        return bool(self._files.complete())

    def write(self, state: Any) -> int | None:
        """Writes a commit; when this returns its number, it is on the disk. The last two are kept. If the disk is full,
        or after an earlier commit cannot be written to any more, a warning says so, and it returns ``None``: training
        goes on, with the last commit there. An error would end one rank after another, as each writes in its turn.
        """
        number = self._last + 1
        try:
            self.directory.mkdir(mode=0o777 & ~WRITABLE, parents=True, exist_ok=True)
            self._last = max(self._files.complete(), default=0)
            number = self._last + 1
            with self._files.write(number) as file:
                write_state(file, state)
                file.chmod(file.stat().st_mode & ~WRITABLE)
            self._last = number
        except OSError as error:
            if error.errno not in _FULL and not self._last:
                raise
            message = "commit %d in %s is not written, training goes on without it: %s."
            _log.warning(message, number, self.directory, error)
            return None
        return number

    def load_last(self, *, own: bool = False) -> Any:
        """The state of the last complete commit, or ``None``. ConfigError: all are damaged, or, if what they have is to
        be unpickled (``own``), they are not only ours.
        """
        files = self._files.complete()
        for number in sorted(files, reverse=True):
            try:
                with self._opened(files[number].name, own=own) as file:
                    return read_state(file)
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


def _check_own(path: Path, descriptor: int) -> None:
    problem = problem_with(path, os.fstat(descriptor))
    if problem:
        raise ConfigError(
            f"{problem}. Who can write a commit of hvd.elastic.run can run code in this job. If it is yours: "
            f"chmod go-w {path}. Else choose another --commit-dir."
        )


def write_state(path: str | os.PathLike[str], state: Any) -> None:
    """Writes ``state`` over ``path``: dicts, lists and tuples of NumPy values (not ``object``), bytes, numbers,
    strings, booleans, ``None``; keys are the last four, but bytes. ConfigError says where something else is.
    """
    members: list[NDArray[Any]] = []
    structure = json.dumps(_encoded(state, members, "state"))
    arrays: dict[str, Any] = {str(index): member for index, member in enumerate(members)}
    arrays[_STATE] = np.frombuffer(structure.encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def read_state(opened: BinaryIO) -> Any:
    """Returns the state of an opened file of ``write_state``; any error says that the file is damaged."""
    with np.load(opened, allow_pickle=False) as file:
        if (damaged := file.zip.testzip()) is not None:
            raise ValueError(f"{damaged} has another checksum")
        return _decoded(json.loads(file[_STATE].tobytes()), file)


def is_plain(value: Any) -> bool:
    """Whether ``write_state`` accepts ``value``.

    >>> is_plain({"best": np.float32(0.5), "epochs": [0, 1]}), is_plain({"model": object()})
    (True, False)
    """
    try:
        _encoded(value, [], "")
    except ConfigError:
        return False
    return True


def _encoded(value: Any, members: list[NDArray[Any]], where: str) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        array, dtype = np.asarray(value), None
        if hasattr(ml_dtypes, array.dtype.name):  # NumPy's format does not know it
            dtype = array.dtype.name
            array = array.view(np.dtype((np.void, array.dtype.itemsize)))
        members.append(array)
        return {kind: [str(len(members) - 1), dtype]}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (bytes, bytearray)):
        members.append(np.frombuffer(value, np.uint8))
        return {"bytes": str(len(members) - 1)}
    if type(value) in (list, tuple):
        items = [_encoded(item, members, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if type(value) is dict and all(type(key) in _PLAIN for key in value):
        return {"dict": [[key, _encoded(item, members, f"{where}[{key!r}]")] for key, item in value.items()]}
    raise ConfigError(
        f"{where} is {value!r:.80} ({type(value).__name__}), which a commit cannot hold: it holds dicts, lists and "
        "tuples of NumPy arrays, bytes, numbers, strings, booleans and None. Convert it, or leave it out."
    )


def _decoded(value: Any, members: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item, members) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: _decoded(item, members) for key, item in content}
    if kind == "tuple":
        return tuple(_decoded(item, members) for item in content)
    if kind == "bytes":
        return members[content].tobytes()
    array = members[content[0]]
    if content[1] is not None:
        array = array.view(np.dtype(getattr(ml_dtypes, content[1])))
    return array if kind == "array" else array[()]
