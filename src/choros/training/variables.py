"""What ranks do with variables: broadcast them from one to the others, and aggregate what replicas assign to them."""

import gc
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.comm import Array, ProcessSet, Request, global_process_set
from choros.comm.request import CollectiveSpec
from choros.comm.transfers import sum_numbers
from choros.parallel.ops import broadcast_arrays

#: The attribute of a variable of which each rank has its own part: the ``WholeState`` that it is of.
OF_SLICE = "_choros_of_slice"


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites every rank's ``variables`` with those of ``root_rank``, now or in each run of a compiled function.

    If an elastic job loses that rank meanwhile, the first one that is left sends its own.

    Args:
        variables: Keras variables (``model.weights``, ``optimizer.variables``), or variables of a framework
            that have ``assign`` or are torch tensors; the same list on every rank, but for an optimizer's state of
            which each rank has a slice: it stays, unless the root was given a whole one.
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
    """``broadcast_variables`` that returns the operations to run in a TensorFlow 1 graph; ``heirs`` ``None``: all."""
    communicator = process_set.communicator
    if communicator.size == 1:
        return []
    for state in dict.fromkeys(getattr(variable, OF_SLICE, None) for variable in variables):
        if state is not None:
            state.receive(root_rank)
    variables = [variable for variable in variables if not hasattr(variable, OF_SLICE)]
    # Not the variables' own names: they may differ on a rank that loaded its model from disk.
    names = [f"variable {index} of {len(variables)}" for index in range(len(variables))]
    values = [value_of(variable) for variable in variables]
    adapter = adapter_of(values[0] if values else None)

    def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
        return broadcast_arrays(hosts, root_rank, names=names, process_set=process_set, heirs=heirs)

    is_root = process_set.ranks[communicator.rank] == root_rank
    received = adapter.host_call(on_host, values, [adapter.spec(value) for value in values])
    if is_root:
        return received
    statistics = [] if adapter.is_symbolic(values) else list(map(_is_statistic, variables))
    changed = [
        variable
        for variable, value, new in itertools.compress(zip(variables, values, received, strict=True), statistics)
        if not np.array_equal(adapter.to_host(value), adapter.to_host(new))
    ]
    updates = [_assign(variable, value) for variable, value in zip(variables, received, strict=True)]
    derive_again(changed)
    return updates


def derive_again(assigned: Sequence[Any]) -> None:
    """Has Keras' ``Normalization`` compute anew what it keeps besides the mean and variance that were assigned."""
    statistics = {id(variable) for variable in assigned if _is_statistic(variable)}
    for layer in gc.get_objects() if statistics else ():  # variables do not know their layers
        is_normalization = issubclass(type(layer), sys.modules["keras"].layers.Normalization)
        if is_normalization and not statistics.isdisjoint(map(id, layer.weights)):
            layer.finalize_state()


def _is_statistic(variable: Any) -> bool:
    return getattr(variable, "name", "") in ("mean", "variance") and value_of(variable) is not variable


def _assign(variable: Any, value: Any) -> Any:
    return variable.assign(value) if hasattr(variable, "assign") else variable.data.copy_(value)


def overwrite(variable: Any, host: Any) -> None:
    """Overwrites a variable of TensorFlow or PyTorch, or one of Keras on these, on this rank alone."""
    value = value_of(variable)
    _assign(value, adapter_of(value).from_host(host, value))


def value_of(variable: Any) -> Any:
    """Returns what a framework's operations read: the value of a Keras variable, and any other variable itself."""
    keras = sys.modules.get("keras")  # not loaded for loops that do not use it
    return variable.value if keras is not None and isinstance(variable, keras.Variable) else variable


# Values that replicas assign to a variable, aggregated as it asks, here by ``sum``:
#
#     rank 0, 31 rows          rank 1, 17 rows          rank 2, without rows
#     assign_add(31.0)         assign_add(17.0)         joined
#             └──────────────── allreduce ─────────────────┘
#     48.0                     48.0                     receives the variable at the end of the epoch
#
# The mean is weighted by the ranks' examples in ``fit``, so that the mean of the ranks' rows is that of all rows; in
# custom loops, as in ``tf.distribute``, all replicas have the same weight.
_DIFFER = (
    "replicas assign values of different sizes to variables with the same aggregation, {} numbers: all replicas must "
    "assign the same variables in the same order."
)
_REQUESTS = {
    kind: Request("variable", kind, spec=CollectiveSpec("sum", differ=_DIFFER))
    for kind in ("sum", "mean", "only_first_replica")
}


def aggregate(kind: str, value: Any, step: Any = None) -> Any:
    """The ranks' values as an ``aggregation`` combines them: in a ``weighting.ModelStep`` those with rows.

    >>> import choros
    >>> choros.init()
    >>> aggregate("mean", np.array([1.0, 2.0]))
    array([1., 2.])
    """
    adapter = adapter_of(value)
    examples, process_set = (1, global_process_set) if step is None else (step.examples, step.process_set)
    known = isinstance(examples, int)

    def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
        host = hosts[0]
        if step is not None and not step.exchanges():
            return [host]
        rows = examples if known else int(hosts[1])
        communicator = process_set.communicator

        def collective() -> NDArray[np.float64]:
            sums = np.zeros(host.size + 1)
            sizes = communicator.agree(_REQUESTS[kind], value=sums.size if rows else 0)
            first = next(rank for rank, size in enumerate(sizes) if size)
            if rows and (kind != "only_first_replica" or communicator.rank == first):
                weight = rows if kind == "mean" and step is not None and step.weighted else 1
                sums[:-1] = host.reshape(-1) * weight
                sums[-1] = weight
            sum_numbers(communicator, sums, sizes, _DIFFER)
            return sums

        sums = communicator.atomic(collective)
        total = sums[:-1] if kind == "sum" else sums[:-1] / sums[-1]
        return [total.reshape(host.shape).astype(host.dtype)]

    inputs = [adapter.stop_gradient(value)] if known else [adapter.stop_gradient(value), examples]
    (result,) = adapter.host_call(on_host, inputs, [adapter.spec(value)])
    return result


def is_aggregated_on_write(variable: Any) -> bool:
    """Whether assignments to a Keras variable in training steps are aggregated."""
    return getattr(variable, "is_aggregated_on_write", False)
