"""Collectives among replicas on the devices of one process, within one compiled step or between threads; and how they
merge what replicas assign to variables.

A variable's ``aggregation`` decides how the replicas' assignments are merged, as in ``tf.distribute``:

    ==================  ==================================================================================
    sum                 metrics: the first replica starts from the value, the others from zero; the sum
    mean                the mean
    none                the mean of floating-point values (batch normalisation), else the first replica's
    only_first_replica  the first replica's
    ==================  ==================================================================================

Trainable variables, and those of optimizers that sum the replicas' gradients, receive the same
update on every replica: nothing is exchanged.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.comm.engines.threads import ThreadCommunicator
from choros.distribute.replicas import Axis, axes_of, axis_of
from choros.distribute.types import ReduceOp
from choros.errors import ConfigError, MismatchError

#: The name of the only axis of the replicas' mesh.
AXIS = "replica"


@final
class ReplicaCollectives:
    """The collectives of one replica; all replicas must make the same calls in the same order: within their compiled
    step or, with a communicator, in a thread for each, on one device, outside of everything that JAX traces.
    """

    def __init__(self, communicator: ThreadCommunicator | None = None) -> None:
        self._communicator = communicator
        self.replica: Any = jax.lax.axis_index(AXIS) if communicator is None else communicator.rank

    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """Returns the sum or the mean of the replicas' arrays, which are of one shape."""
        if self._communicator is not None:
            return reduced(op, _exchange(self._communicator, f"all_reduce, {op.name}", array), None)
        return (jax.lax.psum if op is ReduceOp.SUM else jax.lax.pmean)(jnp.asarray(array), AXIS)

    def all_gather(self, array: Any, axis: int) -> Any:
        """Returns the replicas' arrays, concatenated along ``axis``, in which those of threads may differ."""
        if self._communicator is not None:
            return gathered(_exchange(self._communicator, "all_gather", array), axis)
        return jax.lax.all_gather(jnp.asarray(array), AXIS, axis=axis_of(np.shape(array), axis, "gather"), tiled=True)

    def reduce(self, op: ReduceOp, array: Any, axis: Axis) -> Any:
        """``all_reduce``, which also reduces over the dimensions ``axis`` of each array."""
        if axis is None:
            return self.all_reduce(op, array)
        axes = axes_of(np.shape(array), axis)
        total = self.all_reduce(ReduceOp.SUM, jnp.sum(array, axes))
        if op is ReduceOp.SUM:
            return total
        return _mean_of(total, self.all_reduce(ReduceOp.SUM, np.int32(_count_along(array, axes))))


def _exchange(communicator: ThreadCommunicator, call: str, array: Any) -> list[Any]:
    if isinstance(array, jax.core.Tracer):
        raise ConfigError(
            "the replicas have batches of different shapes, such as the last of an epoch, and call a collective "
            "within jax.jit or jax.grad, where shapes must be equal: make the batch divisible by the number of "
            "replicas (drop_remainder=True), call the collective outside, or start one process per device with "
            "chorosrun."
        )
    calls, arrays = zip(*communicator.exchange((call, jnp.asarray(array))), strict=True)
    if len(set(calls)) > 1:
        raise MismatchError(
            f"the replicas made different calls, {'; '.join(calls)}: all must make the same, in the same order."
        )
    return list(arrays)


@dataclass(frozen=True)
class Flow:
    """A function's Keras variables; by index, those it assigns, and those to which all replicas assign the same value;
    the scope in which they have other values.
    """

    variables: tuple[Any, ...] = ()
    assigned: tuple[int, ...] = ()
    replicated: frozenset[int] = frozenset()
    scope: Any = nullcontext

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The variables that the function assigns."""
        return tuple(self.variables[index] for index in self.assigned)

    def run(
        self, collectives: ReplicaCollectives, values: Sequence[Any], function: Callable[[], Any]
    ) -> tuple[Any, list[Any]]:
        """Calls ``function`` with the variables set to ``values``; also returns the values for ``outputs``."""
        is_first = collectives.replica == 0
        own = [
            jnp.where(is_first, value, jnp.zeros_like(value)) if variable.aggregation == "sum" else value
            for variable, value in zip(self.variables, values, strict=True)
        ]
        with self.scope(zip(self.variables, own, strict=True)) as scope:
            result = function()
        return result, [self._merged(index, scope, collectives) for index in self.assigned]

    def _merged(self, index: int, scope: Any, collectives: ReplicaCollectives) -> Any:
        variable = self.variables[index]
        value = scope.get_current_value(variable)
        if index in self.replicated:
            return value
        averaged = variable.aggregation == "none" and "float" in variable.dtype
        if variable.aggregation == "mean" or averaged:
            return collectives.all_reduce(ReduceOp.MEAN, value)
        if variable.aggregation != "sum":
            value = jnp.where(collectives.replica == 0, value, jnp.zeros_like(value))
        return collectives.all_reduce(ReduceOp.SUM, value)


def reduced(op: ReduceOp, values: Sequence[Any], axis: Axis) -> Any:
    """Returns the sum or the mean of replicas' values that are on one device."""
    if axis is None:
        if len({value.shape for value in values}) > 1:
            raise ConfigError(
                f"reduce(axis=None) adds the replicas' values element by element, but their shapes are "
                f"{', '.join(str(value.shape) for value in values)}: pass axis=0 to reduce over the examples as well."
            )
        return (jnp.sum if op is ReduceOp.SUM else jnp.mean)(jnp.stack(values), 0)
    axes = [axes_of(value.shape, axis) for value in values]
    total = jnp.sum(jnp.stack([value.sum(own) for value, own in zip(values, axes, strict=True)]), 0)
    if op is ReduceOp.SUM:
        return total
    return _mean_of(total, sum(_count_along(value, own) for value, own in zip(values, axes, strict=True)))


def gathered(values: Sequence[Any], axis: int) -> Any:
    """Returns replicas' values that are on one device, concatenated along ``axis``."""
    axes = {axis_of(value.shape, axis, "gather") for value in values}
    others = {tuple(np.delete(value.shape, list(axes))) for value in values}
    if len(axes) > 1 or len(others) > 1:
        raise ConfigError(
            f"gather(axis={axis}): the replicas' values have the shapes "
            f"{', '.join(str(value.shape) for value in values)}; they may differ in that dimension only."
        )
    return jnp.concatenate(values, axes.pop())


def _count_along(array: Any, axes: Sequence[int]) -> int:
    """Returns the number of elements of ``array`` that are reduced to one."""
    return math.prod(np.shape(array)[each] for each in axes)


def _mean_of(total: Any, count: Any) -> Any:
    """Returns the mean of ``count`` values; zero if there are none."""
    return total / jnp.maximum(count, 1)
