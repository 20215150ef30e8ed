"""Checkpoints on disk, each with the number of completed steps.

::

    of tf.train.Checkpoint        directory/checkpoint, ckpt-1.index, …   TensorFlow's files; the number is a variable
    of other objects              directory/run-120/checkpoint…           the files that save(path) wrote
                                  directory/.unfinished.…/run-130/        being written; renamed when it is complete
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from choros.durable import discard, unfinished
from choros.errors import ConfigError

__all__ = ["CheckpointStore", "store_of"]

#: The attribute in which TensorFlow's handler stores the number, so that each can read the other's files.
_RUNS = "checkpointed_runs"
_COMPLETE = re.compile(r"run-(\d+)")


class CheckpointStore(ABC):
    """Saves and restores checkpoints."""

    @property
    @abstractmethod
    def latest(self) -> str | None:
        """The name of the latest complete checkpoint; ``None`` if there is none."""

    @abstractmethod
    def restore(self) -> int:
        """Restores the latest complete checkpoint, if there is one.

        Returns:
            The number of completed steps.
        """

    @abstractmethod
    def save(self, runs: int, *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint, atomically; call it on one process.

        Args:
            runs: the number of completed steps.
            args: positional arguments of the object's ``save``; likewise ``kwargs``.
        """


def store_of(checkpoint: Any, directory: Any, save: Callable[..., Any] | None) -> CheckpointStore:
    """Returns the store of ``checkpoint``.

    Args:
        checkpoint: a ``tf.train.Checkpoint``, a ``tf.train.CheckpointManager``, or an object with ``save(path)`` and
            ``restore(path)``.
        directory: a path; ``None`` for a manager, which has its own.
        save: replaces the object's own ``save``.

    Raises:
        ConfigError: ``checkpoint`` is none of these, or the directory is missing.
    """
    if sys.modules.get("tensorflow"):  # a name that is blocked has None
        import tensorflow as tf

        if isinstance(checkpoint, tf.train.CheckpointManager):
            return _ManagedStore(checkpoint, save)
        if isinstance(checkpoint, tf.train.Checkpoint):
            manager = tf.train.CheckpointManager(checkpoint, _path(directory, checkpoint), max_to_keep=1)
            return _ManagedStore(manager, save)
    if not (hasattr(checkpoint, "save") and hasattr(checkpoint, "restore")):
        raise ConfigError(
            f"a checkpoint of {checkpoint!r} cannot be written: pass a tf.train.Checkpoint, "
            "distribute.experimental.KerasCheckpoint(model), or an object with save(path) and restore(path)."
        )
    return _DirectoryStore(checkpoint, Path(_path(directory, checkpoint)), save)


def _path(directory: Any, checkpoint: Any) -> str:
    if directory is None:
        raise ConfigError(
            f"checkpoint_dir is missing: pass the directory for checkpoints of {type(checkpoint).__name__}."
        )
    return str(directory)


@final
class _ManagedStore(CheckpointStore):
    """The checkpoints of a ``tf.train.CheckpointManager``."""

    def __init__(self, manager: Any, save: Callable[..., Any] | None) -> None:
        import tensorflow as tf

        self._manager = manager
        self._save = save or manager.save
        checkpoint = manager.checkpoint
        if not hasattr(checkpoint, _RUNS):
            setattr(checkpoint, _RUNS, tf.Variable(0, dtype=tf.int64, trainable=False, name=_RUNS))
        self._runs = getattr(checkpoint, _RUNS)

    @property
    def latest(self) -> str | None:
        """The name of the checkpoint's files, without their suffixes."""
        path = self._manager.latest_checkpoint
        return None if path is None else Path(path).name

    def restore(self) -> int:
        """Calls the manager's ``restore_or_initialize``."""
        self._manager.restore_or_initialize()
        return int(self._runs.numpy())

    def save(self, runs: int, *args: Any, **kwargs: Any) -> None:
        """Calls the manager's ``save``."""
        self._runs.assign(runs)
        self._save(*args, **kwargs)


@final
class _DirectoryStore(CheckpointStore):
    """A directory for each checkpoint; only the last is kept."""

    def __init__(self, checkpoint: Any, directory: Path, save: Callable[..., Any] | None) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._save = save or checkpoint.save

    @property
    def latest(self) -> str | None:
        """The directory's name."""
        complete = self._complete()
        return complete[max(complete)].name if complete else None

    def restore(self) -> int:
        """Calls the object's ``restore``."""
        complete = self._complete()
        if not complete:
            return 0
        runs = max(complete)
        self._checkpoint.restore(_within(complete[runs]))
        return runs

    def save(self, runs: int, *args: Any, **kwargs: Any) -> None:
        """Calls the object's ``save``."""
        older = self._complete()
        if runs in older:  # a second request to end, before another step
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        with unfinished(self._directory / f"run-{runs}") as directory:
            directory.mkdir()
            self._save(_within(directory), *args, **kwargs)
        for path in older.values():
            discard(path)

    def _complete(self) -> dict[int, Path]:
        """Returns the completed steps → the directory, of each complete checkpoint."""
        found = ((_COMPLETE.fullmatch(path.name), path) for path in self._directory.glob("run-*"))
        return {int(match[1]): path for match, path in found if match is not None}


def _within(directory: Path) -> str:
    """Returns the path for ``save``, which may add suffixes, and write several files."""
    return str(directory / "checkpoint")
