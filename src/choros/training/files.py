"""Files that are complete at any time: written under another name, then renamed.

::

    unfinished(path)         one file or directory    .unfinished.NAME        ──► NAME
    unfinished_group(path)   several files            .unfinished.NAME/NAME…  ──► NAME…, the one that names them last
    call_unfinished          a function of Keras or TensorFlow, whose arguments tell which of both
    complete_files(model)    all that a model saves is written so
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from choros.comm import is_initialized, topology

__all__ = ["call_unfinished", "complete_files", "note_all_complete", "unfinished", "unfinished_group"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: The names of files that Keras writes one at a time.
_ONE_FILE = (".keras", ".h5", ".hdf5")
#: What is in the directories that TensorFlow and Keras write. One with other files, too, is not replaced.
_OWN_FILES = frozenset(
    {"saved_model.pb", "fingerprint.pb", "keras_metadata.pb", "variables", "assets", "assets.extra", "debug"}
    | {"config.json", "metadata.json", "model.weights.h5"}
)
_SAVED_MODEL = "tf_saved_model"

_all_complete = False


@contextmanager
def unfinished(path: str | os.PathLike[str], writer: str = "") -> Iterator[Path]:
    """A block that writes a file, or a directory, under the name it gets; it gets the name ``path`` after the block.

    Whatever ends the process, or the block, in between: the file of that name is the last complete one.

    Args:
        path: the file or directory. If it is a link, its target is replaced.
        writer: distinguishes processes that write it at once; the same for the next process in its place, which
            overwrites what this one may leave unfinished.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.txt"
        >>> with unfinished(path) as name:
        ...     _ = name.write_text("weights")
        ...     path.exists()
        False
        >>> path.read_text()
        'weights'
    """
    final = Path(os.path.realpath(path))
    # Keras chooses the format by the suffix, so this name keeps it.
    name = final.with_name(f".unfinished.{writer}{final.name}")
    if name.is_dir():
        _remove(name)
    try:
        yield name
        if name.is_dir() and final.is_dir():
            _exchange(name, final)
            _remove(name)
        else:
            name.replace(final)
    except BaseException:
        with suppress(OSError):
            _remove(name)
        raise


@contextmanager
def unfinished_group(path: str | os.PathLike[str], index: str, writer: str = "") -> Iterator[Path]:
    """A block that writes one file or several, in one directory, of which one refers to the others.

    That file does not exist while several are renamed: a reader finds the old files, the new ones or none.

    Args:
        path: the name that the block is to use; it gets the same name in a directory of its own.
        index: the suffix of the file that refers to the others.
        writer: as for ``unfinished``.
    """
    final = Path(os.path.realpath(path))
    directory = final.with_name(f".unfinished.{writer}{final.name}")
    _remove(directory)
    directory.mkdir()
    try:
        yield directory / final.name
        written = sorted(directory.iterdir(), key=lambda file: file.suffix == index)
        for file in written:
            if file.suffix == index and len(written) > 1:
                (final.parent / file.name).unlink(missing_ok=True)
        for file in written:
            file.replace(final.parent / file.name)
    finally:
        with suppress(OSError):
            _remove(directory)


def call_unfinished(own: Callable[..., Any], call: inspect.BoundArguments, path: str) -> Any:
    """Calls a function of Keras or TensorFlow that writes files; they get their names when they are complete.

    Args:
        own: the function.
        call: its arguments, with their defaults.
        path: the name of the argument with the path.
    """
    block = _block_of(call.arguments[path], call.arguments)
    if block is None:
        return own(*call.args, **call.kwargs)
    final = os.fspath(call.arguments[path])
    with block as name, _messages_about(str(name), final) if "format" in call.arguments else nullcontext():
        call.arguments[path] = str(name)
        return own(*call.args, **call.kwargs)


def complete_files(model: Any) -> None:
    """Makes the files of one model complete at any time: those of ``save``, ``save_weights`` and ``export``.

    Keras' callbacks call these methods, too. Only this object is changed.
    """
    for name in ("save", "save_weights", "export"):
        # Bypasses Keras' attribute tracking: the function is not part of the model.
        object.__setattr__(model, name, functools.partial(_completed, model, name))


def note_all_complete() -> None:
    """Notes that Keras' functions write all files so: methods of models have nothing to do any more."""
    global _all_complete
    _all_complete = True


def _completed(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    own = getattr(type(model), name)
    call = inspect.signature(own).bind(model, *args, **kwargs)
    call.apply_defaults()
    path = call.arguments.get("filepath")
    asks = not call.arguments.get("overwrite", True)  # the user, if there is such a file
    if _all_complete or not isinstance(path, (str, os.PathLike)) or (asks and os.path.exists(path)):
        return own(model, *args, **kwargs)
    return call_unfinished(own, call, "filepath")


def _messages_about(name: str, final: str) -> AbstractContextManager[None]:
    from choros.training.keras_internals import messages_about

    return messages_about(name, final)


def _block_of(path: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[Path] | None:
    """Returns the block in which a function with these arguments writes ``path``; ``None`` if it writes in place."""
    name = os.fspath(path)
    final = os.path.realpath(name)
    if "://" in name or not os.path.isdir(os.path.dirname(final)):
        return None
    # Processes that write files of their own may all give them one name.
    writer = f"{topology().rank}." if is_initialized() else ""
    file_format = arguments.get("format", _SAVED_MODEL)
    if arguments.get("max_shard_size") is not None:
        return unfinished_group(name, ".json", writer)
    if file_format != _SAVED_MODEL:  # ONNX and OpenVINO may put weights beside the file, which names them
        return unfinished_group(name, Path(name).suffix, writer)
    is_directory = "format" in arguments or "export_dir" in arguments or arguments.get("zipped") is False
    if is_directory and os.path.isdir(final):
        is_directory = not os.path.ismount(final) and _OWN_FILES.issuperset(os.listdir(final))
    return unfinished(name, writer) if is_directory or name.endswith(_ONE_FILE) else None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two directories: in one step on Linux, where the file system can do so."""
    names = (os.fsencode(one), os.fsencode(other))
    with suppress(AttributeError):
        if ctypes.CDLL(None).renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    aside = one.with_name(f"{one.name}.old")
    _remove(aside)
    other.replace(aside)
    one.replace(other)
    aside.replace(one)
