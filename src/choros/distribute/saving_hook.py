"""The functions that write files, of Keras and TensorFlow: what belongs to a strategy is written as it decides.

::

    model.save(path), keras.saving.save_model(model, path), tf.saved_model.save(model, path),
    tf.train.CheckpointManager(tf.train.Checkpoint(model=model), …).save()
        model, or the checkpoint, was created in a scope  ──► strategy.training.save(write, path)
        otherwise                                         ──► the function itself

A file is usually written after the last scope has been left, and by a function, not by a method of an object of the
scope. So these functions stay replaced once a scope has been entered. From then on every file of Keras, and every
SavedModel, is complete at any time: it is written beside the last one, and then renamed (``training/files.py``).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from choros.distribute.keras_hook import TrainingStrategy, strategy_of
from choros.training.files import call_unfinished, note_all_complete

__all__ = ["guard_saving"]

#: How many objects deep the model of a checkpoint is searched: CheckpointManager → Checkpoint → model.
_DEPTH = 2


def guard_saving() -> None:
    """Replaces the functions that write files, in all libraries that are loaded; the first time only."""
    if "keras" in sys.modules:
        _guard_keras()
    if sys.modules.get("tensorflow") is not None:
        _guard_tensorflow()


@functools.cache
def _guard_keras() -> None:
    from choros.training.keras_internals import file_writers, share_directories

    for owner, name in file_writers():
        _replace(owner, name, "filepath")
    share_directories()
    note_all_complete()


@functools.cache
def _guard_tensorflow() -> None:
    import tensorflow as tf
    from tensorflow.python.saved_model import save

    _replace(save, "save_and_return_nodes", "export_dir")
    for name in ("save", "write"):
        _replace(tf.train.Checkpoint, name, "file_prefix", _Checkpoint)
    _replace(tf.train.CheckpointManager, "save", None, _Manager)


class _Saved:
    """What the processes that do not write learn of a call: nothing, for most functions."""

    def __init__(self, saved: Any, function: str) -> None:
        self.saved = saved
        self.function = function

    def report(self, result: Any) -> Any:
        """Returns, on the process that has written, what the others need to know."""

    def adopt(self, report: Any) -> Any:
        """Returns the result of the call on another process; ``None`` as ``report`` if nothing is known."""


class _Checkpoint(_Saved):
    """A ``tf.train.Checkpoint``, whose processes all count the saved checkpoints."""

    @property
    def counter(self) -> Any:
        return self.saved.save_counter

    def report(self, result: Any) -> Any:
        return result, int(self.counter)

    def adopt(self, report: Any) -> Any:
        path, number = (None, int(self.counter) + 1) if report is None else report
        if self.function == "save":
            self.counter.assign(number)
        return path


class _Manager(_Checkpoint):
    """A ``tf.train.CheckpointManager``, which also knows its latest checkpoint."""

    @property
    def counter(self) -> Any:
        return self.saved.checkpoint.save_counter

    def adopt(self, report: Any) -> Any:
        path = super().adopt(report)
        self.saved._latest_checkpoint = path or self.saved._latest_checkpoint
        return path


def _replace(owner: Any, name: str, path: str | None, kind: type[_Saved] = _Saved) -> None:
    """Replaces a function whose first argument is what it saves.

    Args:
        owner: the function's module or class.
        name: the function's name.
        path: the name of the argument with the path; ``None`` for the attribute ``directory`` of what is saved.
        kind: what processes that do not write learn.
    """
    own: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(own)

    @functools.wraps(own)
    def save(saved: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(saved, *args, **kwargs)
        call.apply_defaults()
        files = saved.directory if path is None else call.arguments.get(path)
        if not isinstance(files, (str, os.PathLike)):
            return own(saved, *args, **kwargs)

        def written() -> Any:
            return own(saved, *args, **kwargs) if path is None else call_unfinished(own, call, path)

        strategy = _strategy_in(saved, _DEPTH)
        if strategy is None or strategy.training is None:
            return written()
        saving = kind(saved, name)
        results: list[Any] = []

        def write() -> Any:
            results.append(written())
            return saving.report(results[0])

        report = strategy.training.save(write, os.fspath(files))
        return results[0] if results else saving.adopt(report)

    setattr(owner, name, save)


def _strategy_in(saved: Any, depth: int) -> TrainingStrategy | None:
    """Returns the strategy of the scope in which ``saved``, or an object that it holds, was created."""
    strategy = strategy_of(saved)
    if strategy is not None or depth == 0:
        return strategy
    held = (_strategy_in(each, depth - 1) for each in getattr(saved, "__dict__", {}).values())
    return next((each for each in held if each is not None), None)
