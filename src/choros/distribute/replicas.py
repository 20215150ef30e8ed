"""The replicas of a strategy: how they run a function together, and their collectives.

One replica per process exchanges values through the job's communicator::

    process 0, replica 0           process 1, replica 1
    strategy.run(step)             strategy.run(step)            every process runs the whole script
      all_reduce(SUM, a) ────────── all_reduce(SUM, b)           a + b on both
    strategy.reduce(MEAN, loss) ─── strategy.reduce(MEAN, loss)  likewise

In a compiled function (``tf.function``, ``jax.jit``) each of these is a call on the host, in program order.

AutoGraph converts what a ``tf.function`` calls, but no libraries; here it leaves out choros, too, as it does
TensorFlow's own strategies, which convert the functions of the user's that they are given.

TensorFlow's oneDNN kernels of convolutions and pooling, on the CPU, return wrong shapes of a batch without rows, or end
the process: Keras' functions get a row of zeros instead, and results are cut to none, with zero gradients. Keras'
``add`` takes what it adds for a bias if that has the static shape (0, n).
"""

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import numpy as np

from choros.arrays import ArraySpec, adapter_of
from choros.comm import Reduction, global_process_set, has_others
from choros.comm.reduction import wide_dtype
from choros.data.rows import Part
from choros.distribute.scope import enter_scope
from choros.distribute.torch_objects import synchronized_torch_objects
from choros.distribute.types import ReduceOp, of_first
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.compression.compressor import is_floating
from choros.parallel.objects import allgather_object
from choros.parallel.random_streams import tensorflow_numbers_of
from choros.parallel.structure import leaves, map_structure
from choros.training.variables import value_of

#: One dimension, or several; ``None``: the replicas' values are reduced element by element.
Axis = int | Sequence[int] | None


class Replicas(ABC):
    """One replica per process of the job, or one per device of this process.

    Attributes:
        part: those of this process among all; its rows of each batch.
        on_device: returns the block in which variables are created on the replicas' device.
    """

    part: Part
    on_device: Callable[[], AbstractContextManager[Any]] = nullcontext

    @final
    @property
    def count(self) -> int:
        """The number of replicas on all processes."""
        return self.part.count

    @final
    @property
    def local_count(self) -> int:
        """The number of this process's replicas."""
        return self.part.local

    @final
    @property
    def first(self) -> int:
        """The index of this process's first replica."""
        return self.part.first

    @property
    def may_differ(self) -> bool:
        """Whether there are replicas in other processes, or may be later, whose values may be others."""
        return False

    @abstractmethod
    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls ``function`` once for each replica of this process, in replica context."""

    @abstractmethod
    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """In cross-replica context: returns the reduced value, on every process."""

    @abstractmethod
    def gather(self, value: Any, axis: int) -> Any:
        """In cross-replica context: returns the replicas' values, concatenated along ``axis``."""

    @abstractmethod
    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """In replica context: returns the sum or the mean of the replicas' values."""

    @abstractmethod
    def all_gather(self, value: Any, axis: int) -> Any:
        """In replica context: returns the replicas' values, concatenated along ``axis``."""


@final
class ReplicaContext:
    """The replica in which ``strategy.run`` calls a function, and its collectives.

    All replicas must call the same collective methods in the same order.

    Attributes:
        strategy: the ``Strategy`` of the replica.
    """

    def __init__(self, strategy: Any, replica_id: Any) -> None:
        self.strategy = strategy
        self._replica_id = replica_id

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica, from 0; a traced number where several replicas share one compiled step."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all processes together."""
        return int(self.strategy.replicas.count)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces the replicas' values, on each replica. Gradients flow through it.

        Args:
            reduce_op: ``SUM`` or ``MEAN``.
            value: an array, a number, or a structure of them; the same shapes on every replica.
            options: has no effect; the engine decides how values are sent.

        Example:
            >>> from choros import distribute
            >>> def step():
            ...     return distribute.get_replica_context().all_reduce("SUM", 2.0)
            >>> distribute.OneDeviceStrategy("cpu").run(step)
            2.0
        """
        return self.strategy.replicas.all_reduce(ReduceOp.of(reduce_op), values_of(value))

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates the replicas' values along ``axis``, on each replica. Gradients flow through it.

        Args:
            value: an array of at least one dimension, or a structure of them; replicas may differ in ``axis`` alone.
            axis: the dimension.
            options: has no effect.
        """
        return self.strategy.replicas.all_gather(values_of(value), axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` in cross-replica context, where ``strategy.reduce`` works.

        Every process calls it for its replica. Unlike TensorFlow's, it may be called within a condition or a nested
        function, provided that all replicas call it.
        """
        with enter_scope(self.strategy):
            return converted(merge_fn)(self.strategy, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        number = self._replica_id if isinstance(self._replica_id, (int, np.integer)) else "traced"
        return f"ReplicaContext(replica {number} of {self.num_replicas_in_sync})"


@final
class ProcessReplicas(Replicas):
    """The job's processes, whose number may change, or this one ``alone``, each with one replica on its device."""

    def __init__(
        self, *, alone: bool = False, on_device: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._alone = alone
        self.on_device = on_device
        self._part = Part(0, 1)
        self._part = self.part

    @property
    def part(self) -> Part:  # type: ignore[override]  # read-only
        """This process, by its rank."""
        size = None if self._alone else global_process_set.size()
        if size is not None:  # else, after shutdown(), the last one
            self._part = Part(global_process_set.rank() or 0, size)
        return self._part

    @property
    def may_differ(self) -> bool:
        """Whether there are others, or may be, in an elastic job."""
        return not self._alone and has_others(global_process_set)

    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls ``function`` on this process's replica."""
        rank, several = self.first, self.count > 1
        with ExitStack() as stack:
            stack.enter_context(self.on_device())
            stack.enter_context(enter_scope(strategy, ReplicaContext(strategy, rank)))
            if several and sys.modules.get("torch") is not None:
                stack.enter_context(synchronized_torch_objects(rank))
            if several and sys.modules.get("keras") is not None:
                stack.enter_context(batches_of_any_rows())
            if several and sys.modules.get("tensorflow") is not None:
                stack.enter_context(tensorflow_numbers_of(rank))
            return converted(function)(*of_first(tuple(args)), **of_first(dict(kwargs)))

    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """Reduces over ``axis`` on the host, then over the processes."""
        value = of_first(value)
        if axis is None:
            return self._allreduce(op, value, "reduce")
        return map_structure(lambda leaf: self._reduce(op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Gathers each leaf."""
        return self.all_gather(of_first(value), axis)

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Reduces all leaves in one grouped allreduce."""
        return self._allreduce(op, value, "all_reduce")

    def all_gather(self, value: Any, axis: int) -> Any:
        """Gathers each leaf."""
        return map_structure(lambda leaf: self._gather(leaf, axis), value)

    def _allreduce(self, op: ReduceOp, value: Any, name: str) -> Any:
        if self.count == 1:
            return value
        given = [_meanable(op, leaf) for leaf in leaves(value)]
        reduced = iter(ops.grouped_allreduce(given, op.engine_op, name=name))
        return map_structure(lambda _: next(reduced), value)

    def _reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int]) -> Any:
        value = _meanable(op, value)
        adapter = adapter_of(value)
        spec = adapter.spec(value)
        axes = axes_of(spec.shape, axis)
        rest = tuple(n for dimension, n in enumerate(spec.shape) if dimension not in axes)

        def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
            (host,) = hosts
            wide = wide_dtype(host.dtype) if is_floating(host.dtype) else None
            total, count = host.sum(axis=axes, dtype=wide), np.asarray(math.prod(host.shape[each] for each in axes))
            if self.count > 1:
                communicator = global_process_set.communicator
                total, count = communicator.grouped_allreduce([total, count], Reduction.SUM, name="reduce")
            return [np.asarray(total / max(int(count), 1) if op is ReduceOp.MEAN else total, spec.dtype)]

        (result,) = adapter.host_call(on_host, [value], [ArraySpec(rest, spec.dtype)])
        return result

    def _gather(self, value: Any, axis: int) -> Any:
        adapter = adapter_of(value)
        if adapter.rows_of(value) is not None:
            raise ConfigError(
                f"gather: {type(value).__name__} cannot be gathered, as in tf.distribute: gather its values and its "
                "indices, or reduce it with SUM."
            )
        spec = adapter.spec(value)
        axis = axis_of(spec.shape, axis, "gather")
        if self.count == 1:
            return value
        if spec.dtype.kind not in "OSU":
            return ops.allgather(value, axis=axis, name="gather")

        def strings_on_host(hosts: Sequence[Any]) -> Sequence[Any]:
            return [np.concatenate(allgather_object(np.asarray(hosts[0]), name="gather"), axis)]

        shape = tuple(None if dimension == axis else n for dimension, n in enumerate(spec.shape))
        (result,) = adapter.host_call(strings_on_host, [value], [ArraySpec(shape, spec.dtype)])
        return result


def values_of(structure: Any) -> Any:
    """Replaces every Keras variable in ``structure`` by its value."""
    return map_structure(value_of, structure)


def _meanable(op: ReduceOp, value: Any) -> Any:
    """Returns integers as floating-point numbers, for a mean."""
    if op is not ReduceOp.MEAN or isinstance(value, (bool, int, float)):
        return value
    adapter = adapter_of(value)
    if adapter.rows_of(value) is not None:
        return value
    return adapter.cast(value, adapter.widest_float) if adapter.spec(value).dtype.kind in "iub" else value


def axis_of(shape: Sequence[int | None], axis: int, method: str) -> int:
    """Returns the index of the dimension ``axis``, counted from the front; ConfigError if there is none such."""
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(
            f"{method}(axis={axis}): the value has the shape {tuple(shape)}, which has no such dimension. Reduce "
            "scalars with axis=None; to gather them, reshape them to arrays of one element first."
        )
    return axis % len(shape)


def axes_of(shape: Sequence[int | None], axis: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the indices of the dimensions over which a value is reduced."""
    return tuple(axis_of(shape, each, "reduce") for each in (axis if isinstance(axis, Sequence) else (axis,)))


def leave_unconverted() -> None:
    """Keeps AutoGraph, if TensorFlow is loaded, from converting functions of choros."""
    if sys.modules.get("tensorflow") is not None:
        _add_rule()


@functools.cache
def _add_rule() -> None:
    import tensorflow  # noqa: F401  (waits if another thread is importing it: parts of it, imported meanwhile, deadlock)
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("choros"), *config.CONVERSION_RULES)


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the user's as AutoGraph converts it in the ``tf.function`` that is being traced, if any."""
    if sys.modules.get("tensorflow") is None:
        return function
    import tensorflow as tf

    if tf.executing_eagerly():
        return function
    autograph = tf.__internal__.autograph
    result: Callable[..., Any] = autograph.tf_convert(
        function, autograph.control_status_ctx(), convert_by_default=False
    )
    return result


@contextmanager
def batches_of_any_rows() -> Iterator[None]:
    """A block in which Keras' normalisations, additions, convolutions and pooling take batches without rows."""
    import keras

    from choros.training.device import tensorflow_gpu
    from choros.training.keras_internals.models import patched_operations, statistics_of_any_rows

    with ExitStack() as stack:
        stack.enter_context(statistics_of_any_rows())
        if keras.backend.backend() == "tensorflow":
            stack.enter_context(patched_operations(_add, _window if tensorflow_gpu() is None else None))
        yield


def _add(own: Callable[..., Any], x1: Any, x2: Any) -> Any:
    import keras

    # Of no numbers the sum is the difference.
    return keras.ops.subtract(x1, x2) if 0 in getattr(x2, "shape", ()) else own(x1, x2)


def _window(own: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    import tensorflow as tf

    def of_no_rows() -> Any:
        # The sum of no rows is a row of zeros, and its gradient has no rows again.
        return own(tf.reduce_sum(inputs, 0, keepdims=True), *args, **kwargs)[:0]

    rows = inputs.shape[0]
    if rows is not None:
        return own(inputs, *args, **kwargs) if rows else of_no_rows()
    return tf.cond(tf.equal(tf.shape(inputs)[0], 0), of_no_rows, lambda: own(inputs, *args, **kwargs))
