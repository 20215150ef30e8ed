"""What a model saves is complete at any time: ``choros/durable.py``, for the functions of Keras and TensorFlow.

::

    call_unfinished(save, …)    one file or directory               NAME
                                several files, one of which         NAME_00000.weights.h5, …, then the index NAME
                                names the others                    (sharded_weights.py)
    complete_files(model)       all that a model saves is written so, and what BackupAndRestore saves of it
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from choros.durable import flush, replace, unfinished, workplace
from choros.training.sharded_weights import unfinished_shards

__all__ = ["call_unfinished", "complete_files", "note_all_complete"]

#: The names of files that Keras writes one at a time.
_ONE_FILE = (".keras", ".h5", ".hdf5")
#: What is in the directories that TensorFlow and Keras write. One with other files, too, is not replaced.
_OWN_FILES = frozenset(
    {"saved_model.pb", "fingerprint.pb", "keras_metadata.pb", "variables", "assets", "assets.extra", "debug"}
    | {"config.json", "metadata.json", "model.weights.h5"}
)
_SAVED_MODEL = "tf_saved_model"

_all_complete = False
#: Called with each file before it is complete.
_amend: ContextVar[Callable[[Path], None] | None] = ContextVar("amend", default=None)


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
    with block as name:
        with _messages_about(str(name), final) if "format" in call.arguments else nullcontext():
            call.arguments[path] = str(name)
            result = own(*call.args, **call.kwargs)
        if (amend := _amend.get()) is not None:
            amend(name)
    return result


def complete_files(model: Any) -> None:
    """Makes the files of one model complete at any time: those of ``save``, ``save_weights`` and ``export``.

    Keras' callbacks call these methods, too. Of models, only this object is changed.
    """
    for name in ("save", "save_weights", "export"):
        # Bypasses Keras' attribute tracking: the function is not part of the model.
        object.__setattr__(model, name, functools.partial(_completed, model, name))
    _complete_backups()


def note_all_complete() -> None:
    """Notes that Keras' functions write all files so: methods of models have nothing to do any more."""
    global _all_complete
    _all_complete = True
    _complete_backups()


@functools.cache
def _complete_backups() -> None:
    from choros.training.keras_internals import make_backups_atomic

    make_backups_atomic(_is_complete, _amended)


def _is_complete(model: Any) -> bool:
    """Whether what the model saves is complete at any time."""
    return _all_complete or "save_weights" in vars(model)


@contextmanager
def _amended(amend: Callable[[Path], None]) -> Iterator[None]:
    """A block in which ``amend`` completes each file that is saved."""
    token = _amend.set(amend)
    try:
        yield
    finally:
        _amend.reset(token)


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
    if arguments.get("max_shard_size") is not None:
        return unfinished_shards(name)
    if arguments.get("format", _SAVED_MODEL) != _SAVED_MODEL:
        return _unfinished_export(name)
    is_directory = "format" in arguments or "export_dir" in arguments or arguments.get("zipped") is False
    if is_directory and os.path.isdir(final):
        is_directory = not os.path.ismount(final) and _OWN_FILES.issuperset(os.listdir(final))
    return unfinished(name) if is_directory or name.endswith(_ONE_FILE) else None


@contextmanager
def _unfinished_export(path: str) -> Iterator[Path]:
    """A block that writes a file, to which ONNX and OpenVINO may add one with the weights, which the first one names.

    The first one does not exist while both are renamed: a reader finds the old files, the new ones or none.
    """
    final = Path(os.path.realpath(path))
    with workplace(final.parent) as directory:
        yield directory / final.name
        flush(directory)
        written = sorted(directory.iterdir(), key=lambda file: file.suffix == final.suffix)
        if len(written) > 1:
            final.unlink(missing_ok=True)
        for file in written:
            replace(file, final.with_name(file.name))
