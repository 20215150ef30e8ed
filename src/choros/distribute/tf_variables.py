"""TensorFlow's own variables that are created in a scope: initial values, ``aggregation`` and ``synchronization``.

Each process has one copy, with the meaning that ``tf.distribute`` gives to its copies::

    synchronization   aggregation          assigned in a replica                       read outside of replicas
    AUTO, ON_WRITE    NONE                 an error: the copies could differ           this copy
                      SUM, MEAN            the sum or the mean of the replicas' values this copy
                      ONLY_FIRST_REPLICA   the first replica's value                   this copy
    ON_READ           SUM, MEAN            this copy only                              the sum or the mean of all copies
                      ONLY_FIRST_REPLICA   this copy only                              the first replica's copy
                      NONE                 this copy only                              an error

Assignments of ``SUM`` and ``MEAN`` are collectives: all replicas make them, and all processes read ``ON_READ``. The
updates of a distributed optimizer, which are the same on all replicas, are none of these.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from choros.comm import global_process_set
from choros.distribute.scope import in_fit, in_replica
from choros.distribute.writing import is_writing
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.identical import are_identical
from choros.training.aggregation import aggregate

__all__ = ["follow_variables", "settle_variables", "variables_of_keras"]


class _CreatorOfThread(threading.local):
    in_keras = False


_thread = _CreatorOfThread()
#: The ``ON_READ`` variables, in the order of their creation; they cannot be hashed.
_read_together: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@contextmanager
def variables_of_keras() -> Iterator[None]:
    """The block in which Keras creates variables, which have their own hooks."""
    outer, _thread.in_keras = _thread.in_keras, True
    try:
        yield
    finally:
        _thread.in_keras = outer


@contextmanager
def follow_variables() -> Iterator[None]:
    """The block in which TensorFlow's new variables are those of all replicas."""
    if sys.modules.get("tensorflow") is None or global_process_set.communicator.size == 1:
        yield
        return
    import tensorflow as tf

    with tf.variable_creator_scope(_create):
        yield


def settle_variables() -> None:
    """Before process 0 writes files: gives it the values of ``ON_READ`` variables that all processes would read."""
    if _read_together:
        gc.collect()  # processes may have released variables at different times
    rank = global_process_set.communicator.rank
    for variable in list(_read_together.values()):
        if (total := _aggregated(variable, _own_value(variable))) is not None:
            kind = variable.aggregation.name
            own_class(variable).assign(variable, total if kind != "SUM" or rank == 0 else total * 0)


def own_class(variable: Any) -> Any:
    """The class that a variable had before this module replaced it."""
    return type(variable).__mro__[2]


def _create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    import tensorflow as tf

    # A checkpoint creates its counter when it is first saved, which only one process may do.
    if _thread.in_keras or in_fit() or is_writing() or kwargs.get("name") == "save_counter":
        return next_creator(**kwargs)
    initial = kwargs.get("initial_value")
    if not tf.executing_eagerly() and not callable(initial):
        return next_creator(**kwargs)  # its initial value is computed by the function that is being compiled
    with tf.init_scope():
        variable = next_creator(**kwargs)
        host = np.asarray(variable.numpy())
        if not are_identical([host]):
            variable.assign(ops.broadcast(host, 0, name="initial value"))
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    if on_read:
        _read_together[next(_numbers)] = variable
    variable.__class__ = _derived(type(variable), _OnReadMixin if on_read else _OnWriteMixin)  # type: ignore[arg-type, unused-ignore]
    return variable


@functools.cache
def _derived(base: type, behaviour: type) -> type:
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (behaviour, base), namespace)


class _OnWriteMixin:
    """A variable whose assignments in replicas are aggregated."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's own, of the aggregated value."""
        return super().assign(self._of_replicas(value), *args, **kwargs)  # type: ignore[misc]

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's own, of the aggregated value."""
        return super().assign_add(self._of_replicas(delta), *args, **kwargs)  # type: ignore[misc]

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's own, of the aggregated value."""
        return super().assign_sub(self._of_replicas(delta), *args, **kwargs)  # type: ignore[misc]

    def _of_replicas(self, value: Any) -> Any:
        variable: Any = self
        if not in_replica():
            return value
        from choros.training.distributed_optimizer import in_apply  # loads Keras

        if in_apply():
            return value
        if variable.aggregation.name != "NONE":
            return _aggregated(self, value)
        raise ConfigError(
            f"a replica assigned the variable {variable.name!r}, which has aggregation=NONE: the copies could "
            "differ. Create it with aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or with "
            "synchronization=tf.VariableSynchronization.ON_READ for a copy of each replica, or assign it outside of "
            "strategy.run."
        )


class _OnReadMixin:
    """A variable whose copies are aggregated when it is read outside of replicas."""

    def value(self) -> Any:
        """The aggregated value; in a replica, its own."""
        return self._of_replicas(super().value())  # type: ignore[misc]

    def read_value(self) -> Any:
        """The aggregated value; in a replica, its own."""
        return self._of_replicas(super().read_value())  # type: ignore[misc]

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's own; outside of replicas, the copies of a sum have equal shares of ``value``."""
        import tensorflow as tf

        variable: Any = self
        if variable.aggregation == tf.VariableAggregation.SUM and not _is_local():
            share = tf.convert_to_tensor(value, variable.dtype)
            value = tf.cast(share / global_process_set.communicator.size, variable.dtype)
        return super().assign(value, *args, **kwargs)  # type: ignore[misc]

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's own."""
        self._check_not_a_sum("assign_add")
        return super().assign_add(delta, *args, **kwargs)  # type: ignore[misc]

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow's own."""
        self._check_not_a_sum("assign_sub")
        return super().assign_sub(delta, *args, **kwargs)  # type: ignore[misc]

    def __repr__(self) -> str:
        """Without the value, which all processes would have to read."""
        variable: Any = self
        return f"<tf.Variable '{variable.name}' shape={variable.shape} dtype={variable.dtype.name}>"

    def _of_replicas(self, value: Any) -> Any:
        if _is_local():
            return value
        total = _aggregated(self, value)
        if total is None:
            variable: Any = self
            raise ConfigError(
                f"the variable {variable.name!r} has synchronization=ON_READ and aggregation=NONE, so that it has no "
                "value outside of replicas: create it with aggregation=SUM, MEAN or ONLY_FIRST_REPLICA, or read it in "
                "strategy.run."
            )
        return total

    def _check_not_a_sum(self, method: str) -> None:
        variable: Any = self
        if variable.aggregation.name == "SUM" and not _is_local():
            raise ConfigError(
                f"{method} of the variable {variable.name!r} outside of replicas: it is the sum of the replicas' "
                "copies, so call it in strategy.run, or assign the sum with assign()."
            )


def _is_local() -> bool:
    return in_replica() or in_fit() or is_writing()


def _own_value(variable: Any) -> Any:
    return own_class(variable).read_value(variable)


def _aggregated(variable: Any, value: Any) -> Any:
    """Returns the replicas' values as the variable aggregates them; ``None`` if it does not."""
    import tensorflow as tf

    kind = variable.aggregation.name
    value = tf.convert_to_tensor(value, variable.dtype)
    return None if kind == "NONE" else aggregate(kind.lower(), value)
