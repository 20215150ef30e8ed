"""Broadcasts of variables from one rank to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from choros.arrays import adapter_of
from choros.comm import ProcessSet, global_process_set
from choros.parallel.ops import broadcast_arrays

__all__ = ["broadcast_updates", "broadcast_variables", "overwrite", "value_of"]


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites every rank's ``variables`` with those of ``root_rank``, now or in each run of a compiled function.

    If an elastic job loses that rank meanwhile, the first one that is left sends its own.

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
    broadcast_updates(variables, root_rank, process_set)


def broadcast_updates(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    heirs: Sequence[int] | None = None,
) -> list[Any]:
    """``broadcast_variables`` that returns the operations to run in a graph of TensorFlow 1.

    Args:
        variables: see there.
        root_rank: see there.
        process_set: see there.
        heirs: as for ``broadcast_arrays``; ``None``: all ranks.
    """
    communicator = process_set.communicator
    if communicator.size == 1:
        return []
    variables = list(variables)
    # Not the variables' own names: they may differ on a rank that loaded its model from disk.
    names = [f"variable {index} of {len(variables)}" for index in range(len(variables))]
    values = [value_of(variable) for variable in variables]
    adapter = adapter_of(values[0] if values else None)

    def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
        left = communicator.launched if heirs is None else heirs
        return broadcast_arrays(hosts, root_rank, names=names, process_set=process_set, heirs=left)

    is_root = process_set.ranks[communicator.rank] == root_rank
    received = adapter.host_call(on_host, values, [adapter.spec(value) for value in values])
    if is_root:
        return received
    return [_assign(variable, value) for variable, value in zip(variables, received, strict=True)]


def _assign(variable: Any, value: Any) -> Any:
    return variable.assign(value) if hasattr(variable, "assign") else variable.data.copy_(value)


def overwrite(variable: Any, host: Any) -> None:
    """Overwrites a variable of TensorFlow or PyTorch, or one of Keras on these, on this rank alone."""
    value = value_of(variable)
    if hasattr(value, "assign"):
        value.assign(host)
    else:
        value.data.copy_(adapter_of(value).from_host(host, value))


def value_of(variable: Any) -> Any:
    """Returns what a framework's operations read: the value of a Keras variable, and any other variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable
