"""Horovod's distributed optimizers of Keras: gradients are averaged over the examples of all ranks. Saved models are
loaded with one, ready to continue training.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel.arguments import REDUCTION_ARGUMENTS, documented
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.plan import ReduceConfig, check_passes, indices_of_groups
from choros.training.device import placed
from choros.training.distributed_optimizer import divide, reducer_of, wrap
from choros.training.keras_internals.models import innermost, trained_variables
from choros.training.keras_internals.saving import load_optimizer_weights_from_hdf5_group
from choros.training.optimizer_reducer import OptimizerReducer

_ADVICE = (
    "Start all ranks from the same values: pass BroadcastGlobalVariablesCallback(0) to model.fit, or call "
    "broadcast_variables(model.variables, root_rank=0) before training. A variable that is to differ between ranks is "
    "registered with optimizer.register_local_var(variable). With shard_state, TensorFlow must not build the model "
    "from the first batch, after which that callback broadcasts: begin it with keras.Input, or call model.build(shape)."
)


@documented(
    **REDUCTION_ARGUMENTS,
    optimizer="any Keras 3 optimizer, a ``LossScaleOptimizer`` included. It is changed in place.",
    name="Horovod's; the optimizer keeps its own name.",
)
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Reduction = Reduction.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    shard_state: bool | None = None,
) -> Any:
    """Makes a Keras optimizer average gradients over all ranks before it applies them.

    The average is over examples, which a choros callback in ``model.fit`` reports: ranks with batches of different
    sizes, or with fewer batches, are weighted by them. Without one, all ranks have the same weight.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument has an invalid value, or the optimizer is distributed already.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    """
    del name, device_dense, device_sparse
    base = _checked(optimizer, process_set)
    config = placed(
        ReduceConfig(
            op=op,
            compressor=compression,
            predivide_factor=gradient_predivide_factor,
            groups=_groups(groups if groups is not None else num_groups, base),
            micro_batches=_micro_batches(base, backward_passes_per_step),
            average_micro_batches=average_aggregated_gradients or backward_passes_per_step == 1,
            process_set=process_set,
        )
    )
    if base is optimizer and keras.config.dtype_policy().name == "mixed_float16":
        # compile() would put the loss scale around the reduction; ranks must reduce gradients before it checks them.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    reducer = OptimizerReducer(
        lambda: config,
        scale_local_gradients=scale_local_gradients,
        sparse_as_dense=sparse_as_dense,
        shard_state=shard_state,
        advice=_ADVICE,
    )
    wrap(optimizer, reducer)
    divide(optimizer)
    return optimizer


@documented(
    **REDUCTION_ARGUMENTS,
    optimizer="as for ``DistributedOptimizer``.",
    name="Horovod's; the optimizer keeps its own name.",
)
def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Reduction = Reduction.AVERAGE,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """``DistributedOptimizer`` for a model of which each rank has some layers of its own.

    Raises:
        ConfigError: ``local_layers`` contains anything else, or a layer that is not built.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=model.layers[:1])
    """
    arguments = dict(locals())
    local = local_variables(arguments.pop("local_layers"))
    optimizer = DistributedOptimizer(**arguments)
    for variable in local:
        optimizer.register_local_var(variable)
    return optimizer


def _checked(optimizer: Any, process_set: ProcessSet) -> Any:
    """Returns the innermost optimizer; an error if ``optimizer`` cannot be distributed."""
    process_set.check_registered("DistributedOptimizer()")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"DistributedOptimizer takes a keras.optimizers.Optimizer, not a {type(optimizer).__name__}: create one, "
            "such as keras.optimizers.Adam(), and pass it."
        )
    base = innermost(optimizer)
    if reducer_of(optimizer) or reducer_of(base):
        raise ConfigError("this optimizer is distributed already: wrap it only once.")
    return base


def _micro_batches(optimizer: Any, backward_passes: int) -> int:
    """Returns the number of micro-batches per update; sets Keras' accumulation if Horovod's argument requests it."""
    check_passes(backward_passes)
    own = optimizer.gradient_accumulation_steps
    if backward_passes == 1:
        return int(own or 1)
    if own is not None:
        raise ConfigError(
            f"backward_passes_per_step={backward_passes} and the optimizer's own gradient_accumulation_steps={own} "
            "both set gradient accumulation: pass only one of them."
        )
    if optimizer.built:
        raise ConfigError(
            "backward_passes_per_step needs an optimizer that has not been built: its accumulators are created with "
            "the optimizer's other state. Create a new optimizer."
        )
    optimizer.gradient_accumulation_steps = backward_passes
    return backward_passes


def local_variables(layers: Any) -> list[Any]:
    """The trainable variables of ``local_layers``: a layer, several, or ``None``."""
    if layers is None:
        return []
    layers = [layers] if isinstance(layers, keras.layers.Layer) or not isinstance(layers, Iterable) else list(layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ConfigError(f"local_layers must be layers of Keras, but one is a {type(layer).__name__}.")
        if not layer.built:
            raise ConfigError(
                f"the layer {layer.name!r} of local_layers is not built, so that it has no variables: build or call "
                "the model first."
            )
    return [variable for layer in layers for variable in layer.trainable_weights]


def _groups(groups: int | Sequence[Sequence[Any]], optimizer: Any) -> int | tuple[tuple[int, ...], ...] | None:
    if not isinstance(groups, int) and not optimizer.built:
        raise ConfigError(
            "groups=[[variable, …], …] needs the order of variables: call optimizer.build(model.trainable_variables) "
            "first, or pass a number of groups, as with backward_passes_per_step, for which none may be built."
        )
    return indices_of_groups(groups, trained_variables(optimizer) if optimizer.built else (), "variable")


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
