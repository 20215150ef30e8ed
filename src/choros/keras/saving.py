"""Loading of saved models, ready to continue training."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from choros.parallel.compression import Compression, Compressor
from choros.training.horovod_optimizer import DistributedOptimizer
from choros.training.keras_internals.models import trained_variables
from choros.training.keras_internals.saving import load_optimizer_weights_from_hdf5_group


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
    shard_state: bool | None = None,
) -> Any:
    """Loads a Keras model with its optimizer's state restored and the optimizer distributed already.

    The file may have been saved with or without choros.

    Args:
        filepath: a ``.keras`` or ``.h5`` file.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other custom objects by the names that the model's configuration uses.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: Horovod's; Keras 3 has no legacy optimizers.
        shard_state: as for ``DistributedOptimizer``.

    Returns:
        The model; without a distributed optimizer if it was saved without one.

    Example::

        model = hvd.load_model("checkpoint-7.keras", custom_objects={"dice_loss": dice_loss})
        model.fit(x, y, initial_epoch=7, epochs=10)
    """
    del legacy_opts
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        optimizer = _bound(model.optimizer, model, Path(filepath))
        model.optimizer = DistributedOptimizer(optimizer, compression=compression, shard_state=shard_state)
    return model


def _bound(optimizer: Any, model: Any, path: Path) -> Any:
    """The optimizer with its state: of an ``.h5`` file Keras 3.15 builds it before a sequential model has variables."""
    known = {id(variable) for variable in trained_variables(optimizer)} if optimizer.built else set()
    if path.suffix not in (".h5", ".hdf5") or all(id(variable) in known for variable in model.trainable_variables):
        return optimizer
    import h5py

    bound = type(optimizer).from_config(optimizer.get_config())
    bound.build(model.trainable_variables)
    with h5py.File(path) as file:
        if "optimizer_weights" in file:
            saved = load_optimizer_weights_from_hdf5_group(file)
            for variable, value in zip(bound.variables, saved, strict=True):
                variable.assign(np.asarray(value))
    return bound
