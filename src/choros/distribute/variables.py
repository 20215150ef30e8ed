"""Variables of Keras and TensorFlow that replicas assign, with the meaning that ``tf.distribute`` gives to copies.

Each process has one copy; this holds in replicas, for TensorFlow's variables and Keras', for Keras' also in ``fit``::

    synchronization        aggregation          assigned there                           read outside of replicas
    auto, on_write, none   none                 this copy only; TensorFlow's: an error   this copy
                           sum, mean            the sum or mean of the replicas' values  this copy
                           only_first_replica   the first replica's value                this copy
    on_read                none                 this copy only                           TensorFlow's: an error
                           sum, mean            this copy only                           the sum or mean of all copies
                           only_first_replica   this copy only                           the first replica's copy

Aggregated assignments are collectives, and so are reads of ``on_read``: all must make them. Optimizers update all
replicas in the same way: nothing is exchanged. Metrics are aggregated by their results.

Keras' default is ``none``. Of such variables the *statistics* that layers keep of their inputs, as batch normalisation
does, are averaged when they are read after replicas have assigned them; in ``fit`` a callback averages instead::

    strategy.run(step)          replica 0                replica 1
      moving_mean.assign(…)     its own value            its own value            nothing is exchanged
    moving_mean.numpy()         ────────────── mean ──────────────                all processes must read it
    model.evaluate, save, …     ────────────── mean ──────────────
"""

import functools
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Reduction, global_process_set
from choros.distribute.scope import assign_strategy, current_strategy, in_fit, in_replica
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.identical import are_identical
from choros.training.replaced import derived, own_class
from choros.training.thread import doing, thread
from choros.training.variables import aggregate

_log = logging.getLogger("choros")
#: TensorFlow's methods that assign a part of a variable, but for those that add to it; the last is ``v[:2].assign()``.
_OF_PARTS = (
    *("scatter_max", "scatter_min", "scatter_mul", "scatter_div", "scatter_update", "batch_scatter_update"),
    *("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update", "scatter_nd_max", "scatter_nd_min"),
    "_strided_slice_assign",
)
#: How far from their mean, as a part of their size, replicas' rows are that are no moving averages.
_APART = 0.2
#: The ``on_read`` variables by their ``id``, in the order of their creation: variables compare by value.
_read_together: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
#: The statistics that a replica has assigned since they were averaged, by their ``id``.
_assigned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
#: Those that a function assigns that was compiled meanwhile: each of its calls does.
_compiled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@contextmanager
def follow_variables() -> Iterator[None]:
    """The block in which TensorFlow's new variables are those of all replicas."""
    if sys.modules.get("tensorflow") is None:
        yield
        return
    import tensorflow as tf

    with tf.variable_creator_scope(_create):
        yield


def _create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    import tensorflow as tf

    # A checkpoint creates its counter when it is first saved, which only one process may do.
    if thread.creating_keras_variable or in_fit() or thread.writing_files or kwargs.get("name") == "save_counter":
        return next_creator(**kwargs)
    if thread.building_slices:  # they are different on each process
        return next_creator(**kwargs)
    initial = kwargs.get("initial_value")
    if not tf.executing_eagerly() and not callable(initial):  # the function that is being compiled computes it
        if kwargs.get("aggregation") not in (None, tf.VariableAggregation.NONE):
            raise ConfigError(
                f"the variable {kwargs.get('name')!r} is created in a tf.function, where aggregation has no effect: "
                "create it before, with strategy.scope(), or give its initial value as a function without arguments."
            )
        return next_creator(**{**kwargs, "initial_value": ops.broadcast(initial, 0, name="initial value")})
    with tf.init_scope():
        variable = next_creator(**kwargs)
        if aggregates(variable):  # by a scope within this one
            return variable
        host = np.asarray(variable.numpy())
        if not are_identical([host]):
            variable.assign(ops.broadcast(host, 0, name="initial value"))
    assign_strategy(variable, current_strategy())
    is_on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    _follow(variable, is_on_read, _OnReadOfTensorFlow if is_on_read else _OnWriteOfTensorFlow)
    return variable


def follow_aggregation(variable: Any) -> None:
    """Makes a new variable of Keras aggregate what replicas assign to their copies, as it asks."""
    if variable.aggregation != "none" and not thread.creating_metric_variable:
        is_on_read = variable.synchronization == "on_read"
        _follow(variable, is_on_read, _OnReadOfKeras if is_on_read else _OnWrite)


def _follow(variable: Any, is_on_read: bool, methods: type) -> None:
    if is_on_read:
        _read_together[id(variable)] = variable
    kind: Any = type(variable)
    variable.__class__ = derived(kind, methods)


def aggregates(variable: Any) -> bool:
    """Whether ``follow_aggregation`` has changed the variable."""
    return isinstance(variable, (_OnWrite, _OnRead))


def release(variable: Any) -> None:
    """Undoes ``follow_aggregation``, for variables that all replicas assign in the same way."""
    if aggregates(variable):
        variable.__class__ = own_class(variable)
        _read_together.pop(id(variable), None)


def assign_initial(variable: Any, value: Any) -> None:
    """Assigns the initial value, which is the same on all replicas, to a new variable; also within a replica."""
    if isinstance(variable, _OnRead) and _kind(variable) == "sum":
        value = _share_of_sum(variable, value)
    _assign_copy(variable, value)


def follow_statistic(variable: Any) -> None:
    """Makes a weight of a layer, which is not trained, one whose value is averaged when it is read."""
    kind: Any = type(variable)
    variable.__class__ = derived(kind, _Statistic)


def average_statistics(model: Any = None) -> None:
    """Averages the statistics of ``model``, or of all, that replicas have assigned; every process must call it."""
    if not _assigned:
        return
    if model is None:
        gc.collect()  # processes may have released models at different times
        _average(list(_assigned.values()))
    else:
        _average([each for each in model.non_trainable_variables if id(each) in _assigned])


def _average(statistics: Sequence[Any]) -> None:
    for variable in statistics:
        if id(variable) not in _compiled:
            del _assigned[id(variable)]
    average_variables(statistics)


def average_variables(variables: Sequence[Any]) -> None:
    """Assigns the mean of the processes' values to ``variables`` of Keras, on each process; to counters of steps, of
    which a process without rows in some has counted fewer, their maximum.
    """
    from choros.training.keras_internals.models import local_value

    values = [local_value(variable) for variable in variables]
    own = [adapter_of(value).to_host(value) for value in values]
    if not own:
        return
    means = global_process_set.communicator.grouped_allreduce(own, name="statistics")
    numbers = [index for index, each in enumerate(own) if each.ndim == 0]
    if numbers:
        values_and_parts = [[float(own[index]), float(own[index]) % 1] for index in numbers]
        largest = global_process_set.communicator.allreduce(np.array(values_and_parts), Reduction.MAX, name="counters")
        for index, (value, part) in zip(numbers, largest, strict=True):
            means[index] = means[index].dtype.type(value) if part == 0 else means[index]  # whole numbers on all
    for variable, each, mean in zip(variables, own, means, strict=True):
        if each.ndim > 1 and global_process_set.rank() == 0 and _size(each - mean) > _APART * (_size(each) or 1.0):
            _warn_of_rows(variable.path)
        variable.assign(mean)  # on PyTorch, to the memory of ``each``


def _size(array: Any) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


@functools.cache
def _warn_of_rows(path: str) -> None:
    _log.warning(
        "the replicas had very different values of %r, and go on with their mean: right for a moving average, but not "
        "for a queue of rows, which each fills from its own batches. For those of the first replica on all, create it "
        'with trainable=False, aggregation="only_first_replica".',
        path,
    )


def share_equally(model: Any) -> None:
    """Before ``fit``, which starts from the copies of process 0: gives all copies of a variable the same value."""
    for variable in model.variables:
        if isinstance(variable, _OnRead):
            variable.assign(variable.value)


def settle_variables() -> None:
    """Before process 0 writes files: gives it the values of ``on_read`` variables that all processes would read, and
    the means of statistics; not in ``fit``, nor in what is being written.
    """
    if in_fit() or thread.writing_files or global_process_set.communicator.size == 1:
        return
    average_statistics()
    if _read_together:
        gc.collect()  # processes may have released variables at different times
    for variable in list(_read_together.values()):
        kind = _kind(variable)
        if kind != "none":
            with doing("using_own_copy"):
                own = variable.value if _is_of_keras(variable) else variable.read_value()
            total = aggregate(kind, _tensor(variable, own))
            is_counted = kind != "sum" or global_process_set.communicator.rank == 0
            _assign_copy(variable, total if is_counted else total * 0)


class _OnWrite:
    """The methods of a variable whose assignments are aggregated where replicas make them together."""

    is_aggregated_on_write = True

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign(_written(self, value), *args, **kwargs)  # type: ignore[misc]

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _written(self, value)
        with doing("using_own_copy"):  # Keras' own calls assign
            return super().assign_add(value, *args, **kwargs)  # type: ignore[misc]

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _written(self, value)
        with doing("using_own_copy"):
            return super().assign_sub(value, *args, **kwargs)  # type: ignore[misc]


class _OnWriteOfTensorFlow(_OnWrite):
    """Has TensorFlow's methods that assign a part, too; what ``scatter_add`` and ``scatter_sub`` add is aggregated."""

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        if _replicas_assign():
            return self.assign_add(_dense(self, sparse_delta))
        return super().scatter_add(sparse_delta, *args, **kwargs)  # type: ignore[misc]

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        if _replicas_assign():
            return self.assign_sub(_dense(self, sparse_delta))
        return super().scatter_sub(sparse_delta, *args, **kwargs)  # type: ignore[misc]


def _assigning_a_part(method: str) -> Callable[..., Any]:
    """Returns TensorFlow's ``method`` for replicas: the part that the first one assigns, if the variable asks for it,
    else an error, as replicas may assign different parts.
    """

    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        together = _replicas_assign()
        if together and (kind := _kind_of_written(self)) != "only_first_replica":
            raise ConfigError(
                f"a replica assigned a part of the variable {self.name!r} by {method.strip('_')}: parts have no "
                f"{kind}, as replicas may assign different ones. Use scatter_add or scatter_sub, assign the "
                "whole variable, or create it with aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA."
            )
        result = getattr(super(_OnWriteOfTensorFlow, self), method)(*args, **kwargs)
        return self.assign(self.read_value()) if together else result

    return assign


for _method in _OF_PARTS:
    setattr(_OnWriteOfTensorFlow, _method, _assigning_a_part(_method))


class _OnRead:
    """The methods of a variable whose copies are aggregated when it is read outside of replicas and of ``fit``."""

    value: Any

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The framework's own; outside of replicas, the copies of a sum have equal shares of ``value``."""
        if _kind(self) == "sum" and not _is_local(self):
            value = _share_of_sum(self, value)
        with doing("using_own_copy"):  # on PyTorch, Keras' own writes to the tensor that it reads
            return super().assign(value, *args, **kwargs)  # type: ignore[misc]

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_not_a_sum(self, "assign_add")
        return super().assign_add(value, *args, **kwargs)  # type: ignore[misc]

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_not_a_sum(self, "assign_sub")
        return super().assign_sub(value, *args, **kwargs)  # type: ignore[misc]

    def _serialize_to_tensors(self) -> Any:
        """TensorFlow's own; process 0 has what all would read, as ``settle_variables`` gives it."""
        with doing("using_own_copy"):
            return super()._serialize_to_tensors()  # type: ignore[misc]

    def _restore_from_tensors(self, restored: dict[str, Any]) -> Any:
        """TensorFlow's own, on each process: the copies of a sum have equal shares, as of what is assigned."""
        if _kind(self) == "sum" and not _is_local(self):
            restored = {name: _share_of_sum(self, value) for name, value in restored.items()}
        with doing("using_own_copy"):
            return super()._restore_from_tensors(restored)  # type: ignore[misc]


class _OnReadOfKeras(_OnRead):
    @property
    def value(self) -> Any:
        from choros.training.keras_internals.models import has_value

        own = super().value
        return _read(self, own) if has_value(self) else own

    def __repr__(self) -> str:
        """Keras' own, without the value, which all processes would have to read."""
        variable: Any = self
        return f"<Variable path={variable.path}, shape={variable.shape}, dtype={variable.dtype}>"


class _Statistic:
    """The methods of a Keras variable that replicas assign without communication, averaged when it is read."""

    __repr__ = _OnReadOfKeras.__repr__

    @property
    def value(self) -> Any:
        """The mean of the replicas' values if they have assigned it; in a replica, its own."""
        if id(self) in _assigned and not (in_replica() or in_fit() or thread.writing_files):
            from choros.training.keras_internals.models import local_value

            value = local_value(self)
            if adapter_of(value).is_symbolic([value]):
                return aggregate("mean", value)
            _average([self])
        return super().value  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        result = super().assign(value)  # type: ignore[misc]
        if in_replica():
            _assigned[id(self)] = self
            if adapter_of(result).is_symbolic([result]):
                _compiled[id(self)] = self
        return result


class _OnReadOfTensorFlow(_OnRead):
    def value(self) -> Any:
        return _read(self, super().value())

    def read_value(self) -> Any:
        return _read(self, super().read_value())  # type: ignore[misc]

    def __repr__(self) -> str:
        variable: Any = self
        return f"<tf.Variable '{variable.name}' shape={variable.shape} dtype={variable.dtype.name}>"


def _written(variable: Any, value: Any) -> Any:
    """Returns what is assigned where a replica, or a step of ``fit``, assigns ``value``."""
    step = None
    if not in_replica():
        step = _step_of_fit() if _is_of_keras(variable) and in_fit() else None
        if step is None:
            return value
    if thread.using_own_copy or thread.applying_updates:
        return value
    return aggregate(_kind_of_written(variable), _tensor(variable, value), step)


def _replicas_assign() -> bool:
    """Whether what is assigned here, to a variable of TensorFlow, is one replica's."""
    return in_replica() and not (thread.using_own_copy or thread.applying_updates)


def _kind_of_written(variable: Any) -> str:
    """Returns how what replicas assign to the variable is aggregated; an error if it is not."""
    kind = _kind(variable)
    if kind == "none":
        raise ConfigError(
            f"a replica assigned the variable {variable.name!r}, which has aggregation=NONE: the copies could "
            "differ. Create it with aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or with "
            "synchronization=tf.VariableSynchronization.ON_READ for a copy of each replica, or assign it outside of "
            "strategy.run."
        )
    return kind


def _dense(variable: Any, rows: Any) -> Any:
    """Returns what ``rows`` add to a variable of TensorFlow, in its shape."""
    import tensorflow as tf

    values = tf.convert_to_tensor(rows.values, variable.dtype)
    return tf.scatter_nd(tf.expand_dims(rows.indices, -1), values, tf.shape(variable, rows.indices.dtype))


def _step_of_fit() -> Any:
    """Returns the step of ``fit`` that this thread runs, if ranks make it of their own rows."""
    from choros.training.weighting import step_of_this_thread

    step = step_of_this_thread()
    return None if step is None or step.of_all_ranks else step


def _read(variable: Any, own: Any) -> Any:
    if _is_local(variable):
        return own
    kind = _kind(variable)
    if kind == "none":
        raise ConfigError(
            f"the variable {variable.name!r} has synchronization=ON_READ and aggregation=NONE, so that it has no "
            "value outside of replicas: create it with aggregation=SUM, MEAN or ONLY_FIRST_REPLICA, or read it in "
            "strategy.run."
        )
    return aggregate(kind, _tensor(variable, own))


def _check_not_a_sum(variable: Any, method: str) -> None:
    if _kind(variable) == "sum" and not _is_local(variable):
        raise ConfigError(
            f"{method} of the variable {getattr(variable, 'path', variable.name)!r} outside of replicas: it is the sum "
            "of the replicas' copies, so call it in strategy.run, or assign the sum with assign()."
        )


def _is_local(variable: Any) -> bool:
    """Whether the program reads and assigns this process's copy here."""
    if thread.using_own_copy or in_replica() or in_fit() or thread.writing_files:
        return True
    if not _is_of_keras(variable):
        return False
    from choros.training.keras_internals.models import in_stateless_scope

    return bool(in_stateless_scope())


def _assign_copy(variable: Any, value: Any) -> None:
    with doing("using_own_copy"):
        variable.assign(value)


def _share_of_sum(variable: Any, value: Any) -> Any:
    """Returns this process's part of ``value``, of which the sum is ``value``; whole numbers have whole parts."""
    tensor, communicator = _tensor(variable, value), global_process_set.communicator
    adapter = adapter_of(tensor)
    dtype = adapter.spec(tensor).dtype
    if dtype.kind in "iu":
        share = (tensor + (communicator.size - 1 - communicator.rank)) // communicator.size
    else:
        share = tensor / communicator.size
    return adapter.cast(share, dtype)


def _is_of_keras(variable: Any) -> bool:
    return isinstance(variable.aggregation, str)


def _kind(variable: Any) -> str:
    """Returns the ``aggregation`` of a variable, of which TensorFlow has an enumeration."""
    kind: str = variable.aggregation if _is_of_keras(variable) else variable.aggregation.name.lower()
    return kind


def _tensor(variable: Any, value: Any) -> Any:
    """Returns ``value`` as a tensor of the variable's dtype."""
    if _is_of_keras(variable):
        import keras

        return keras.ops.convert_to_tensor(value, variable.dtype)
    import tensorflow as tf

    return tf.convert_to_tensor(value, variable.dtype)
