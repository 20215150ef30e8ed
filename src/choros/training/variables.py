"""Broadcasts of variables from one rank to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from choros.arrays import ArraySpec, adapter_of, framework_adapter
from choros.comm import ProcessSet, global_process_set
from choros.parallel.ops import broadcast_arrays

__all__ = ["broadcast_in_step", "broadcast_variables"]


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites every rank's ``variables`` with those of ``root_rank``.

    Args:
        variables: Keras variables (``model.weights``, ``optimizer.variables``), or variables of a framework
            that have ``assign`` or are torch tensors; the same list on every rank.
        root_rank: a global rank.
        process_set: the ranks that participate.

    Raises:
        MismatchError: ranks have different variables; the message shows the first that differs.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
    """
    if process_set.communicator.size == 1:
        return
    variables = list(variables)
    # Not the variables' own names: they may differ on a rank that loaded its model from disk.
    names = [f"variable {index} of {len(variables)}" for index in range(len(variables))]
    hosts = [adapter_of(_value(variable)).to_host(_value(variable)) for variable in variables]
    received = broadcast_arrays(hosts, root_rank, names=names, process_set=process_set)
    for variable, host in zip(variables, received, strict=True):
        if hasattr(variable, "assign"):
            variable.assign(host)
        else:
            value = adapter_of(variable).from_host(host, variable)
            variable.data.copy_(value)


def broadcast_in_step(variables: Sequence[Any], root_rank: int) -> None:
    """``broadcast_variables`` of Keras variables inside a training step, which may be a compiled function."""
    communicator = global_process_set.communicator
    if communicator.size == 1:
        return
    values = [keras.ops.convert_to_tensor(variable) for variable in variables]
    outputs = [ArraySpec(tuple(v.shape), np.dtype(keras.backend.standardize_dtype(v.dtype))) for v in variables]

    def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
        return [communicator.broadcast(host, root_rank, name="variables") for host in hosts]

    received = framework_adapter(keras.backend.backend()).host_call(on_host, values, outputs)
    if communicator.rank != root_rank:
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
