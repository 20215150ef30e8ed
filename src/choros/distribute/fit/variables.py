"""Keras variables with an ``aggregation`` of their own, with the meaning that ``tf.distribute`` gives them.

The table is that of ``tf_variables.py``; ``none`` is Keras' default, for which ``statistics.py`` has the rules::

    synchronization         aggregation         assigned in a replica, or in fit         read outside of both
    auto, on_write, none    none                this copy only                           this copy
                            sum, mean           the sum or mean of the replicas' values  this copy
                            only_first_replica  the first replica's value                this copy
    on_read                 sum, mean           this copy only                           the sum or mean of all copies
                            only_first_replica  this copy only                           the first replica's copy

Optimizers update variables in the same way on all replicas: nothing is exchanged. The variables of metrics are
aggregated by their results.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from choros.comm import global_process_set
from choros.distribute.scope import in_fit, in_replica
from choros.distribute.writing import is_writing
from choros.errors import ConfigError
from choros.training.aggregation import aggregate
from choros.training.distributed_optimizer import derive, in_apply
from choros.training.keras_internals import has_value, in_stateless_scope, local_value
from choros.training.weighting import step_of_this_thread

__all__ = [
    "aggregates",
    "assign_initial",
    "follow_aggregation",
    "release",
    "settle_aggregated",
    "share_equally",
    "variables_of_metrics",
]


class _VariableState(threading.local):
    in_metric = False
    assigns_copy = False


_state = _VariableState()
#: The ``on_read`` variables by their ``id``, in the order of their creation: variables compare by value.
_read_together: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@contextmanager
def variables_of_metrics() -> Iterator[None]:
    """The block in which a metric creates a variable."""
    outer, _state.in_metric = _state.in_metric, True
    try:
        yield
    finally:
        _state.in_metric = outer


def aggregates(variable: Any) -> bool:
    """Whether ``follow_aggregation`` has changed the variable."""
    return isinstance(variable, (_WrittenMixin, _ReadMixin))


def follow_aggregation(variable: Any) -> None:
    """Makes a new variable aggregate what replicas assign to their copies, as it asks."""
    if variable.aggregation == "none" or _state.in_metric:
        return
    if variable.synchronization == "on_read":
        variable.__class__ = derive(type(variable), _ReadMixin)
        _read_together[id(variable)] = variable
    else:
        variable.__class__ = derive(type(variable), _WrittenMixin)


def assign_initial(variable: Any, value: Any) -> None:
    """Assigns the initial value, which is the same on all replicas, to a new variable; also within a replica."""
    if not aggregates(variable):
        variable.assign(value)
        return
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        value = _share_of_sum(variable, value)
    _assign_copy(variable, value)


def release(variable: Any) -> None:
    """Undoes ``follow_aggregation``, for variables that all replicas assign in the same way."""
    if aggregates(variable):
        variable.__class__ = own_class(variable)
        _read_together.pop(id(variable), None)


def share_equally(model: Any) -> None:
    """Before ``fit``, which starts from the copies of process 0: gives all copies of a variable the same value."""
    for variable in model.variables:
        if isinstance(variable, _ReadMixin):
            variable.assign(variable.value)


def settle_aggregated() -> None:
    """Before process 0 writes files: gives it the values that all processes would read."""
    if _read_together:
        gc.collect()  # processes may have released variables at different times
    rank = global_process_set.communicator.rank
    for variable in list(_read_together.values()):
        total = aggregate(variable.aggregation, local_value(variable))
        _assign_copy(variable, total if variable.aggregation != "sum" or rank == 0 else total * 0)


def own_class(variable: Any) -> Any:
    """The class that a variable had before this module replaced it."""
    return type(variable).__mro__[2]


class _WrittenMixin:
    """A variable whose assignments are aggregated where replicas make them together."""

    is_aggregated_on_write = True

    def assign(self, value: Any) -> Any:
        """Keras' own, of the aggregated value."""
        return super().assign(_aggregated(self, value))  # type: ignore[misc]

    def assign_add(self, value: Any) -> Any:
        """Keras' own, of the aggregated value."""
        return super().assign(self + _aggregated(self, value))  # type: ignore[misc]

    def assign_sub(self, value: Any) -> Any:
        """Keras' own, of the aggregated value."""
        return super().assign(self - _aggregated(self, value))  # type: ignore[misc]


class _ReadMixin:
    """A variable whose copies are aggregated when it is read outside of replicas and of ``fit``."""

    @property
    def value(self) -> Any:
        """The aggregated value; in a replica, its own."""
        own = super().value  # type: ignore[misc]
        variable: Any = self
        if _is_local() or not has_value(variable):
            return own
        return aggregate(variable.aggregation, keras.ops.convert_to_tensor(own))

    def assign(self, value: Any) -> Any:
        """Keras' own; outside of replicas, the copies of a sum have equal shares of ``value``."""
        variable: Any = self
        if variable.aggregation == "sum" and not _is_local():
            value = _share_of_sum(variable, value)
        return _assign_copy(variable, value)

    def assign_add(self, value: Any) -> Any:
        """Keras' own, in replicas."""
        self._check_not_a_sum("assign_add")
        return super().assign_add(value)  # type: ignore[misc]

    def assign_sub(self, value: Any) -> Any:
        """Keras' own, in replicas."""
        self._check_not_a_sum("assign_sub")
        return super().assign_sub(value)  # type: ignore[misc]

    def _check_not_a_sum(self, method: str) -> None:
        variable: Any = self
        if variable.aggregation == "sum" and not _is_local():
            raise ConfigError(
                f"{method} of the variable {variable.path!r} outside of replicas: it is the sum of the replicas' "
                "copies, so call it in strategy.run, or assign the sum with assign()."
            )

    def __repr__(self) -> str:
        """Keras' own, without the value, which all processes would have to read."""
        variable: Any = self
        return f"<Variable path={variable.path}, shape={variable.shape}, dtype={variable.dtype}>"


def _assign_copy(variable: Any, value: Any) -> Any:
    """Keras' own ``assign``, which on PyTorch writes to the tensor that it reads."""
    outer, _state.assigns_copy = _state.assigns_copy, True
    try:
        return own_class(variable).assign(variable, value)
    finally:
        _state.assigns_copy = outer


def _share_of_sum(variable: Any, value: Any) -> Any:
    share = keras.ops.convert_to_tensor(value, variable.dtype) / global_process_set.communicator.size
    return keras.ops.cast(share, variable.dtype)


def _is_local() -> bool:
    return _state.assigns_copy or in_replica() or in_fit() or is_writing() or in_stateless_scope()


def _aggregated(variable: Any, value: Any) -> Any:
    if in_apply():
        return value
    if in_replica():
        return aggregate(variable.aggregation, keras.ops.convert_to_tensor(value, variable.dtype))
    step = step_of_this_thread()
    if step is None or step.of_all_ranks or not in_fit():
        return value
    value = keras.ops.convert_to_tensor(value, variable.dtype)
    return aggregate(
        variable.aggregation,
        value,
        process_set=step.process_set,
        examples=step.examples,
        weighted=step.weighted,
        exchanges=step.exchanges,
    )
