"""One state of a training run in one file: nested dicts and lists of arrays, bytes, numbers and strings.

The file is NumPy's ``.npz``: a zip archive, with a checksum for each member. Nothing in it is unpickled::

    0.npy, 1.npy, …    the arrays and bytes
    state.npy          JSON: the structure, the small values, and what each array is

    {"w": bfloat16 array, "best": None}   ►   {"dict": [["w", {"array": ["0", "bfloat16"]}], ["best", null]]}
"""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from choros.errors import ConfigError

__all__ = ["is_plain", "read_state", "write_state"]

_STATE = "state"
_PLAIN = (bool, int, float, str, type(None))


def write_state(path: str | os.PathLike[str], state: Any) -> None:
    """Writes ``state`` to the file ``path``.

    Args:
        path: the file; it is overwritten.
        state: dicts, lists and tuples of NumPy arrays and scalars of any dtype but ``object``, bytes, ints, floats,
            strings, booleans and ``None``. Keys of dicts are strings, numbers, booleans or ``None``.

    Raises:
        ConfigError: something else is in it; the message says where.
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

    Example:
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
