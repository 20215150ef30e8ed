"""Keras variables that a function reads and assigns, as its inputs and outputs, which JAX needs to compile it.

::

    def step(x):                         variables in ──► ┌──────────┐
        loss = model(x) …                                 │ replica 0│ ──► out 0 ─┐
        metric.update_state(loss)                     ──► ├──────────┤            ├─ merged ──► assigned
        return loss                                       │ replica 1│ ──► out 1 ─┘
                                                      ──► └──────────┘

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

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import keras

from choros.distribute.reduce_op import ReduceOp

__all__ = ["Flow", "record", "share_variables_of"]

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def share_variables_of(optimizer: Any) -> None:
    """Registers that all replicas apply the same updates to the variables of ``optimizer``."""
    _optimizers.add(optimizer)


@dataclass(frozen=True)
class Flow:
    """The variables of one function.

    Attributes:
        variables: those that the function reads or assigns.
        assigned: the indices in ``variables`` of those that it assigns.
        replicated: the indices of those to which all replicas assign the same value.
    """

    variables: tuple[Any, ...]
    assigned: tuple[int, ...]
    replicated: frozenset[int]

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The variables that the function assigns."""
        return tuple(self.variables[index] for index in self.assigned)

    def run(
        self, values: Sequence[Any], is_first: Any, function: Callable[[], Any], all_reduce: Callable[..., Any]
    ) -> tuple[Any, list[Any]]:
        """Calls ``function`` on one replica, with the variables set to ``values``.

        Args:
            values: one for each variable.
            is_first: whether this is the first replica.
            function: reads and assigns the variables.
            all_reduce: reduces an array over the replicas, given a ``ReduceOp`` and the array.

        Returns:
            The result of ``function``, and the values to assign to ``outputs``.
        """
        own = [
            jnp.where(is_first, value, jnp.zeros_like(value)) if variable.aggregation == "sum" else value
            for variable, value in zip(self.variables, values, strict=True)
        ]
        with _Recorder(zip(self.variables, own, strict=True)) as scope:
            result = function()
        return result, [self._merged(index, scope, is_first, all_reduce) for index in self.assigned]

    def _merged(self, index: int, scope: _Recorder, is_first: Any, all_reduce: Callable[..., Any]) -> Any:
        variable = self.variables[index]
        value = scope.get_current_value(variable)
        if index in self.replicated:
            return value
        averaged = variable.aggregation == "none" and "float" in variable.dtype
        if variable.aggregation == "mean" or averaged:
            return all_reduce(ReduceOp.MEAN, value)
        if variable.aggregation == "sum":
            return all_reduce(ReduceOp.SUM, value)
        return all_reduce(ReduceOp.SUM, jnp.where(is_first, value, jnp.zeros_like(value)))


def record(trace: Callable[[Callable[[Callable[[], Any]], Any]], None]) -> Flow:
    """Returns the variables that a function reads and assigns; the function is traced, not computed.

    Args:
        trace: traces the function; it must call the function through the callable that it is given.
    """
    recorder = _Recorder()

    def recorded(function: Callable[[], Any]) -> Any:
        with recorder:
            return function()

    # Variables that the function creates are initialised on leaving the outer scope, when nothing is traced any more.
    with keras.StatelessScope():
        trace(recorded)
    variables = tuple(recorder.seen.values())
    assigned = tuple(index for index, key in enumerate(recorder.seen) if key in recorder.state_mapping)
    of_optimizers = {id(variable) for optimizer in _optimizers for variable in optimizer.variables}
    replicated = {index for index in assigned if variables[index].trainable or id(variables[index]) in of_optimizers}
    return Flow(variables, assigned, frozenset(replicated))


class _Recorder(keras.StatelessScope):
    """Records which variables are read or assigned; a subclass of Keras' scope, because Keras calls its methods.

    Attributes:
        seen: the variables by their ``id``, because they compare by value.
    """

    def __init__(self, state_mapping: Any = None) -> None:
        super().__init__(state_mapping)
        self.seen: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        """Records the variable; see Keras."""
        self.seen.setdefault(id(variable), variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records the variable; see Keras."""
        self.seen.setdefault(id(update[0]), update[0])
        super().add_update(update)
