"""Models back from disk, ready to go on training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from choros.keras.optimizer import DistributedOptimizer
from choros.parallel.compression import Compression, Compressor

__all__ = ["load_model"]


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a Keras model whose optimizer, its state restored, is distributed already.

    The file may have been saved with or without choros.

    Args:
        filepath: a ``.keras`` or ``.h5`` file.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other things by the names under which the model knows them.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: Horovod's; Keras 3 has no legacy optimizers.

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
        model.optimizer = DistributedOptimizer(_bound(model.optimizer, model), compression=compression)
    return model


def _bound(optimizer: Any, model: Any) -> Any:
    """The optimizer, made for the model's variables.

    Keras (3.15) restores the optimizer of an ``.h5`` file for variables that a sequential model then replaces,
    so that it refuses to train it; its state is right, and in the same order.
    """
    known = {id(variable) for variable in optimizer._trainable_variables}
    if not optimizer.built or all(id(variable) in known for variable in model.trainable_variables):
        return optimizer
    bound = type(optimizer).from_config(optimizer.get_config())
    bound.build(model.trainable_variables)
    for variable, restored in zip(bound.variables, optimizer.variables, strict=True):
        variable.assign(restored)
    return bound
