"""Collectives among replicas on the devices of one process: within one compiled step, or between threads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.comm import Communicator, Reduction
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replicas import Axis
from choros.errors import ConfigError

__all__ = [
    "AXIS",
    "ReplicaCollectives",
    "ThreadCollectives",
    "TracedCollectives",
    "axes_of",
    "axis_of",
    "count_along",
    "mean_of",
]

#: The name of the only axis of the replicas' mesh.
AXIS = "replica"


class ReplicaCollectives(ABC):
    """The collectives of one replica; all replicas must make the same calls in the same order.

    Attributes:
        replica: the index of this replica; traced in a compiled step.
    """

    replica: Any

    @abstractmethod
    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """Returns the sum or the mean of the replicas' arrays."""

    @abstractmethod
    def all_gather(self, array: Any, axis: int) -> Any:
        """Returns the replicas' arrays, concatenated along ``axis``."""

    @final
    def reduce(self, op: ReduceOp, array: Any, axis: Axis) -> Any:
        """``all_reduce``, which also reduces over the dimensions ``axis`` of each array."""
        if axis is None:
            return self.all_reduce(op, array)
        axes = axes_of(array, axis)
        total = self.all_reduce(ReduceOp.SUM, jnp.sum(array, axes))
        if op is ReduceOp.SUM:
            return total
        return mean_of(total, self.all_reduce(ReduceOp.SUM, np.int32(count_along(array, axes))))


@final
class TracedCollectives(ReplicaCollectives):
    """Collectives within the compiled step of all replicas."""

    def __init__(self) -> None:
        self.replica = jax.lax.axis_index(AXIS)

    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """``psum`` or ``pmean``; XLA may combine several of them."""
        return (jax.lax.psum if op is ReduceOp.SUM else jax.lax.pmean)(jnp.asarray(array), AXIS)

    def all_gather(self, array: Any, axis: int) -> Any:
        """``all_gather`` of arrays of one shape."""
        return jax.lax.all_gather(jnp.asarray(array), AXIS, axis=axis_of(array, axis, "gather"), tiled=True)


@final
class ThreadCollectives(ReplicaCollectives):
    """Collectives between threads, one per replica, outside of everything that JAX traces."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.replica = communicator.rank

    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """Reduces in host memory."""
        return self._on_host(array, lambda host: self._communicator.allreduce(_fractional(op, host), _ENGINE_OPS[op]))

    def all_gather(self, array: Any, axis: int) -> Any:
        """Gathers in host memory; the arrays may differ in the dimension ``axis``."""
        axis = axis_of(array, axis, "gather")

        def gathered(host: Any) -> Any:
            return np.moveaxis(self._communicator.allgather(np.ascontiguousarray(np.moveaxis(host, axis, 0))), 0, axis)

        return self._on_host(array, gathered)

    def _on_host(self, array: Any, function: Callable[[Any], Any]) -> Any:
        if isinstance(array, jax.core.Tracer):
            raise ConfigError(
                "the replicas have batches of different shapes, such as the last of an epoch, and call a collective "
                "within jax.jit or jax.grad, where shapes must be equal: make the batch divisible by the number of "
                "replicas (drop_remainder=True), call the collective outside, or start one process per device with "
                "chorosrun."
            )
        return jnp.asarray(function(np.asarray(jnp.asarray(array))))


_ENGINE_OPS = {ReduceOp.SUM: Reduction.SUM, ReduceOp.MEAN: Reduction.AVERAGE}


def _fractional(op: ReduceOp, host: Any) -> Any:
    """Converts integers to floating point for a mean."""
    return host.astype(np.float32) if op is ReduceOp.MEAN and host.dtype.kind in "iub" else host


def axis_of(array: Any, axis: int, method: str) -> int:
    """Returns the index of the dimension ``axis`` of ``array``, counted from the front.

    Raises:
        ConfigError: ``array`` has no such dimension.
    """
    shape = np.shape(array)
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(
            f"{method}(axis={axis}): the value has the shape {shape}, which has no such dimension. Reduce "
            "scalars with axis=None; to gather them, reshape them to arrays of one element first."
        )
    return axis % len(shape)


def axes_of(array: Any, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the indices of the dimensions over which ``array`` is reduced."""
    return tuple(axis_of(array, each, "reduce") for each in (axis if isinstance(axis, Sequence) else (axis,)))


def count_along(array: Any, axes: Sequence[int]) -> int:
    """Returns the number of elements of ``array`` that are reduced to one."""
    return math.prod(np.shape(array)[each] for each in axes)


def mean_of(total: Any, count: Any) -> Any:
    """Returns the mean of ``count`` values; zero if there are none."""
    return total / jnp.maximum(count, 1)
