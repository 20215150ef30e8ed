"""Values that replicas assign to a variable, aggregated as it asks: ``sum``, ``mean`` or ``only_first_replica``.

::

    rank 0, 31 rows          rank 1, 17 rows          rank 2, without rows
    assign_add(31.0)         assign_add(17.0)         joined
            └──────────────── allreduce ─────────────────┘
    sum: 48.0                48.0                     receives the variable at the end of the epoch

The mean is weighted by the ranks' examples in ``fit``, so that the mean of the ranks' rows is that of all rows; in
custom loops, as in ``tf.distribute``, all replicas have the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.comm import ProcessSet, Reduction, Request, global_process_set
from choros.errors import MismatchError
from choros.parallel.reduce.joining import Participation

__all__ = ["aggregate", "is_aggregated_on_write", "participation"]

_REQUESTS = {kind: Request("variable", kind) for kind in ("sum", "mean", "only_first_replica")}


def aggregate(
    kind: str,
    value: Any,
    *,
    process_set: ProcessSet = global_process_set,
    examples: Any = None,
    weighted: bool = False,
    exchanges: Callable[[], bool] = lambda: True,
) -> Any:
    """Returns the ranks' values as a variable's ``aggregation`` combines them; also inside compiled functions.

    Args:
        kind: ``sum``, ``mean`` or ``only_first_replica``.
        value: this rank's, an array of any framework of numbers.
        process_set: the ranks.
        examples: the number of this rank's rows, an integer or an integer array; with 0 its value does not count.
            ``None``: it has some.
        weighted: whether these numbers are the weights of a mean; otherwise the ranks' values have the same weight.
        exchanges: returns whether the other ranks assign, too; asked whenever it runs.

    Raises:
        MismatchError: ranks assign values of different sizes.

    Example:
        >>> import choros
        >>> choros.init()
        >>> aggregate("mean", np.array([1.0, 2.0]))
        array([1., 2.])
    """
    adapter = adapter_of(value)
    known = examples is None or isinstance(examples, int)

    def on_host(hosts: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        host = hosts[0]
        if not exchanges():
            return [host]
        rows = int(hosts[1]) if not known else 1 if examples is None else examples
        communicator = process_set.communicator

        def collective() -> NDArray[np.float64]:
            sums = np.zeros(host.size + 1)
            sizes = communicator.agree(_REQUESTS[kind], value=sums.size if rows else 0)
            _check_sizes(sizes)
            first = next(rank for rank, size in enumerate(sizes) if size)
            if rows and (kind != "only_first_replica" or communicator.rank == first):
                weight = rows if kind == "mean" and weighted else 1
                sums[:-1] = host.reshape(-1) * weight
                sums[-1] = weight
            communicator.reduce_in_place(sums, Reduction.SUM)
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


def participation(process_set: ProcessSet) -> Participation:
    """How a rank without rows participates in what steps assign."""

    def add_nothing(sizes: Sequence[int]) -> None:
        _check_sizes(sizes)
        process_set.communicator.reduce_in_place(np.zeros(max(sizes)), Reduction.SUM)

    return dict.fromkeys(_REQUESTS.values(), add_nothing)


def _check_sizes(sizes: Sequence[int]) -> None:
    """Every rank sees the same sizes: 0 for ranks without rows."""
    if len(set(sizes) - {0}) > 1:
        raise MismatchError(
            f"replicas assign values of different sizes to variables with the same aggregation, {list(sizes)} numbers: "
            "all replicas must assign the same variables in the same order."
        )
