"""Checkpoints on disk, each with the number of completed steps; of a Keras model, in one file, on every framework.

::

    of tf.train.Checkpoint        directory/checkpoint, ckpt-1.index, …   TensorFlow's files; the number is a variable
    of other objects              directory/run-120/checkpoint…           the files that save(path) wrote
                                  directory/.unfinished.…/run-130/        being written; renamed when it is complete
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array
from choros.durable import Numbered
from choros.errors import ConfigError

#: The attribute in which TensorFlow's handler stores the number, so that each can read the other's files.
_RUNS = "checkpointed_runs"
#: The path for ``save``, which may add suffixes, and write several files.
_FILES = "checkpoint"


@final
class KerasCheckpoint:
    """The weights of a model and the state of its optimizer, for a ``PreemptionCheckpointHandler``.

    The file is in NumPy's ``.npz`` format. It does not contain the seeds of random layers, nor the metrics.

    Args:
        model: a built model.
        optimizer: the optimizer that trains it; by default the one with which it was compiled.

    Raises:
        ConfigError: the model has no variables yet.

    Example:
        >>> import keras, os, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> checkpoint = KerasCheckpoint(model, keras.optimizers.Adam())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpoint.save(os.path.join(directory, "checkpoint"))
        ...     checkpoint.restore(os.path.join(directory, "checkpoint"))
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self._model = model
        self._optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if not model.built:
            raise ConfigError(
                f"KerasCheckpoint({model.name!r}): this model has no variables yet, so none can be restored: give it "
                "a keras.Input, or call model.build(…), first."
            )
        if self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(model.trainable_variables)

    def save(self, path: str) -> None:
        """Writes the file ``path``."""
        from choros.training.sliced_optimizer import whole_values

        arrays: dict[str, Any] = {}
        for index, weight in enumerate(self._model.weights):
            arrays[f"weight {index}"] = adapter_of(weight.value).to_host(weight.value)
        of_optimizer = () if self._optimizer is None else whole_values(self._optimizer)
        arrays.update((f"optimizer {index}", value) for index, value in enumerate(of_optimizer))
        with open(path, "wb") as file:
            np.savez(file, **arrays)

    def restore(self, path: str) -> None:
        """Overwrites the variables with those of the file ``path``.

        A process without the optimizer's state, as under ``CentralStorageStrategy``, does not restore that state.

        Raises:
            ConfigError: the file is of another model or optimizer.
        """
        from choros.training.distributed_optimizer import reducer_of
        from choros.training.sliced_optimizer import assign_whole, whole_outlines

        optimizer, weights = self._optimizer, self._model.weights
        outlines = [] if optimizer is None else whole_outlines(optimizer)
        expected = {f"weight {index}": tuple(weight.shape) for index, weight in enumerate(weights)}
        expected |= {f"optimizer {index}": each.shape for index, each in enumerate(outlines)}
        with np.load(path, allow_pickle=False) as file:
            saved = dict(file)
        reducer = reducer_of(self._optimizer)
        if reducer is not None and not reducer.has_state:
            saved = {name: array for name, array in saved.items() if name in expected}
        found = {name: array.shape for name, array in saved.items()}
        for name in sorted({*expected, *found}):
            if expected.get(name) != found.get(name):
                raise ConfigError(
                    f"{path} does not match {self._model.name!r} and its optimizer: the shape of {name} "
                    f"is {found.get(name, 'missing')} in the file, and {expected.get(name, 'missing')} here."
                )
        for index, weight in enumerate(weights):
            weight.assign(_typed(saved[f"weight {index}"], weight.dtype))
        if optimizer is not None:
            own = [_typed(saved[f"optimizer {index}"], each.dtype) for index, each in enumerate(outlines)]
            assign_whole(optimizer, own)


def _typed(array: Array, dtype: str) -> Array:
    """An array of ``dtype``: NumPy's format has no bfloat16, and such arrays are loaded as plain bytes."""
    return array.view(np.dtype(dtype)) if array.dtype.kind == "V" else array


@final
class _ManagedStore:
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
        """The name of the latest complete checkpoint's files, without their suffixes; ``None`` if there is none."""
        path = self._manager.latest_checkpoint
        return None if path is None else Path(path).name

    def restore(self) -> int:
        """Restores the latest checkpoint, if there is one; returns the number of completed steps."""
        self._manager.restore_or_initialize()
        return int(self._runs.numpy())

    def save(self, runs: int, *args: Any, **kwargs: Any) -> None:
        """Writes a checkpoint of ``runs`` completed steps; call it on one process."""
        self._runs.assign(runs)
        self._save(*args, **kwargs)


@final
class _DirectoryStore:
    """A directory for each checkpoint; only the last is kept."""

    def __init__(self, checkpoint: Any, directory: Path, save: Callable[..., Any] | None) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._directories = Numbered(directory, "run-", kept=1)
        self._save = save or checkpoint.save

    @property
    def latest(self) -> str | None:
        _, directory = self._last()
        return None if directory is None else directory.name

    def restore(self) -> int:
        runs, directory = self._last()
        if directory is not None:
            self._checkpoint.restore(str(directory / _FILES))
        return runs

    def save(self, runs: int, *args: Any, **kwargs: Any) -> None:
        if runs in self._directories.complete():  # a second request to end, before another step
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._directories.write(runs) as directory:
            directory.mkdir()
            self._save(str(directory / _FILES), *args, **kwargs)

    def _last(self) -> tuple[int, Path | None]:
        return max(self._directories.complete().items(), default=(0, None))


def store_of(checkpoint: Any, directory: Any, save: Callable[..., Any] | None) -> _ManagedStore | _DirectoryStore:
    """Returns the store of a TensorFlow checkpoint, of a manager, which has its own directory, or of an object with
    ``restore(path)`` and ``save(path)``, which a given ``save`` replaces; ConfigError if it is none of these.
    """
    train: Any = getattr(sys.modules.get("tensorflow"), "train", None)
    if train is not None and isinstance(checkpoint, train.CheckpointManager):
        return _ManagedStore(checkpoint, save)
    of_tensorflow = train is not None and isinstance(checkpoint, train.Checkpoint)
    if not of_tensorflow and not (hasattr(checkpoint, "save") and hasattr(checkpoint, "restore")):
        raise ConfigError(
            f"a checkpoint of {checkpoint!r} cannot be written: pass a tf.train.Checkpoint, "
            "distribute.experimental.KerasCheckpoint(model), or an object with save(path) and restore(path)."
        )
    if directory is None:
        raise ConfigError(
            f"checkpoint_dir is missing: pass the directory for checkpoints of {type(checkpoint).__name__}."
        )
    if of_tensorflow:
        return _ManagedStore(train.CheckpointManager(checkpoint, str(directory), max_to_keep=1), save)
    return _DirectoryStore(checkpoint, Path(directory), save)
