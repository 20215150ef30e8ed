"""How replicas that are devices of one process exchange values: within a program of all, or as threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.comm import Communicator, Reduction
from choros.distribute.reduce_op import ReduceOp
from choros.errors import ConfigError

__all__ = ["AXIS", "Link", "Program", "Threads", "axis_of", "mean_of"]

#: The name of the only axis of the replicas' mesh.
AXIS = "replica"


class Link(ABC):
    """What a replica has to reach the others with; all call each method alike, in the same order.

    Attributes:
        replica: which one this is; traced in a program.
    """

    replica: Any

    @abstractmethod
    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """The sum or the mean of the replicas' arrays."""

    @abstractmethod
    def all_gather(self, array: Any, axis: int) -> Any:
        """The replicas' arrays one after the other."""

    @final
    def reduce(self, op: ReduceOp, array: Any, axis: int | None) -> Any:
        """``all_reduce``, also over the dimension ``axis`` of each array."""
        if axis is None:
            return self.all_reduce(op, array)
        axis = axis_of(array, axis, "reduce")
        total = self.all_reduce(ReduceOp.SUM, jnp.sum(array, axis))
        if op is ReduceOp.SUM:
            return total
        return mean_of(total, self.all_reduce(ReduceOp.SUM, np.int32(np.shape(array)[axis])))


@final
class Program(Link):
    """Within a compiled program of all replicas."""

    def __init__(self) -> None:
        self.replica = jax.lax.axis_index(AXIS)

    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """Any number of these travel together, if XLA sees fit."""
        return (jax.lax.psum if op is ReduceOp.SUM else jax.lax.pmean)(jnp.asarray(array), AXIS)

    def all_gather(self, array: Any, axis: int) -> Any:
        """The arrays have one shape."""
        return jax.lax.all_gather(jnp.asarray(array), AXIS, axis=axis_of(array, axis, "gather"), tiled=True)


@final
class Threads(Link):
    """On a thread of its own, outside of all that JAX traces."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.replica = communicator.rank

    def all_reduce(self, op: ReduceOp, array: Any) -> Any:
        """Through the host."""
        return self._on_host(array, lambda host: self._communicator.allreduce(_fractional(op, host), _ENGINE_OPS[op]))

    def all_gather(self, array: Any, axis: int) -> Any:
        """The arrays may differ in the dimension."""
        axis = axis_of(array, axis, "gather")

        def gathered(host: Any) -> Any:
            return np.moveaxis(self._communicator.allgather(np.ascontiguousarray(np.moveaxis(host, axis, 0))), 0, axis)

        return self._on_host(array, gathered)

    def _on_host(self, array: Any, function: Callable[[Any], Any]) -> Any:
        if isinstance(array, jax.core.Tracer):
            raise ConfigError(
                "replicas have batches of different shapes, such as the last of an epoch, and exchange something "
                "within jax.jit or jax.grad, which takes equal shapes: make the batch divisible by the number of "
                "replicas (drop_remainder=True), exchange it outside, or start one process for each device with "
                "chorosrun."
            )
        return jnp.asarray(function(np.asarray(jnp.asarray(array))))


_ENGINE_OPS = {ReduceOp.SUM: Reduction.SUM, ReduceOp.MEAN: Reduction.AVERAGE}


def _fractional(op: ReduceOp, host: Any) -> Any:
    """A mean of whole numbers has a fraction."""
    return host.astype(np.float32) if op is ReduceOp.MEAN and host.dtype.kind in "iub" else host


def axis_of(array: Any, axis: int, method: str) -> int:
    """The dimension ``axis`` of ``array``, counted from the front.

    Raises:
        ConfigError: it has no such dimension.
    """
    shape = np.shape(array)
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(
            f"{method}(axis={axis}): the value has the shape {shape}, which has no such dimension. Values of one "
            "number a replica are reduced with axis=None, and gathered after they have been made arrays of one element."
        )
    return axis % len(shape)


def mean_of(total: Any, count: Any) -> Any:
    """The mean of ``count`` values; of none, zero."""
    return total / jnp.maximum(count, 1)
