"""Keras variables that a function reads and assigns, as inputs and outputs of it: what JAX needs to compile it.

::

    def step(x):                         variables in ──► ┌──────────┐
        loss = model(x) …                                 │ replica 0│ ──► out 0 ─┐
        metric.update_state(loss)                     ──► ├──────────┤            ├─ merged ──► assigned
        return loss                                       │ replica 1│ ──► out 1 ─┘
                                                      ──► └──────────┘

What becomes of the replicas' assignments is what the variable's ``aggregation`` says, as in ``tf.distribute``:

    ==================  ==================================================================================
    sum                 metrics: the first replica goes on from the value, the others from zero; the sum
    mean                the mean
    none                the mean if it is a number with a fraction (batch normalisation), else the first's
    only_first_replica  the first's
    ==================  ==================================================================================

Trainable variables, and those of optimizers that sum the replicas' gradients, are updated alike: nothing is exchanged.
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
    """Notes that replicas update the variables of ``optimizer`` alike."""
    _optimizers.add(optimizer)


@dataclass(frozen=True)
class Flow:
    """The variables of one function.

    Attributes:
        variables: those that it reads or assigns.
        assigned: the places in ``variables`` of those that it assigns.
        alike: the places of those that all replicas assign alike.
    """

    variables: tuple[Any, ...]
    assigned: tuple[int, ...]
    alike: frozenset[int]

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The variables that it assigns."""
        return tuple(self.variables[place] for place in self.assigned)

    def through(
        self, values: Sequence[Any], is_first: Any, function: Callable[[], Any], all_reduce: Callable[..., Any]
    ) -> tuple[Any, list[Any]]:
        """Calls ``function`` with ``values`` in the variables, on one replica.

        Args:
            values: one for each variable.
            is_first: whether this is the first replica.
            function: gets the variables' values from them.
            all_reduce: of a ``ReduceOp`` and an array, over the replicas.

        Returns:
            What ``function`` returned, and what is to be assigned to ``outputs``.
        """
        own = [
            jnp.where(is_first, value, jnp.zeros_like(value)) if variable.aggregation == "sum" else value
            for variable, value in zip(self.variables, values, strict=True)
        ]
        with _Recorder(zip(self.variables, own, strict=True)) as scope:
            result = function()
        return result, [self._merged(place, scope, is_first, all_reduce) for place in self.assigned]

    def _merged(self, place: int, scope: _Recorder, is_first: Any, all_reduce: Callable[..., Any]) -> Any:
        variable = self.variables[place]
        value = scope.get_current_value(variable)
        if place in self.alike:
            return value
        averaged = variable.aggregation == "none" and "float" in variable.dtype
        if variable.aggregation == "mean" or averaged:
            return all_reduce(ReduceOp.MEAN, value)
        if variable.aggregation == "sum":
            return all_reduce(ReduceOp.SUM, value)
        return all_reduce(ReduceOp.SUM, jnp.where(is_first, value, jnp.zeros_like(value)))


def record(trace: Callable[[Callable[[Callable[[], Any]], Any]], None]) -> Flow:
    """What a function that is traced without being computed does to variables.

    Args:
        trace: traces the function, which it calls through what it is given.
    """
    recorder = _Recorder()

    def watched(function: Callable[[], Any]) -> Any:
        with recorder:
            return function()

    # On leaving the outer scope, nothing being traced any more, variables that the function has made get their values.
    with keras.StatelessScope():
        trace(watched)
    variables = tuple(recorder.met.values())
    assigned = tuple(place for place, key in enumerate(recorder.met) if key in recorder.state_mapping)
    of_optimizers = {id(variable) for optimizer in _optimizers for variable in optimizer.variables}
    alike = {place for place in assigned if variables[place].trainable or id(variables[place]) in of_optimizers}
    return Flow(variables, assigned, frozenset(alike))


class _Recorder(keras.StatelessScope):
    """Notes which variables are asked for their value, or assigned; derives from Keras' as Keras calls it.

    Attributes:
        met: the variables by their ``id``; they are compared value by value.
    """

    def __init__(self, state_mapping: Any = None) -> None:
        super().__init__(state_mapping)
        self.met: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        """Keras' own."""
        self.met.setdefault(id(variable), variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keras' own."""
        self.met.setdefault(id(update[0]), update[0])
        super().add_update(update)
