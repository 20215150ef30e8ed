"""One replica per process; values are exchanged through the job's communicator.

::

    process 0, replica 0           process 1, replica 1
    strategy.run(step)             strategy.run(step)            every process runs the whole script
      all_reduce(SUM, a) ────────── all_reduce(SUM, b)           a + b on both
    strategy.reduce(MEAN, loss) ─── strategy.reduce(MEAN, loss)  likewise

In a compiled function (``tf.function``, ``jax.jit``) each of these is a call on the host, in program order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import numpy as np

from choros.arrays import ArraySpec, adapter_of
from choros.comm import Reduction, global_process_set, is_initialized, topology
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replica_context import ReplicaContext
from choros.distribute.replicas import Axis, Replicas
from choros.distribute.scope import enter_scope
from choros.distribute.tf_windows import windows_of_any_rows
from choros.distribute.torch_objects import synchronized_torch_objects
from choros.distribute.values import select
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.objects import allgather_object
from choros.parallel.structure import map_structure
from choros.parallel.tf_random import tensorflow_numbers_of
from choros.topology import Topology

__all__ = ["ProcessReplicas"]


@final
class ProcessReplicas(Replicas):
    """Processes, each with one replica: those of the job, whose number may change, or this one alone.

    Args:
        alone: whether this process is the only one, whatever the job.
    """

    local_count = 1

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._position = topology() if not alone and is_initialized() else Topology()

    @property
    def count(self) -> int:  # type: ignore[override]  # read-only
        """The number of processes."""
        return self._topology.size

    @property
    def first(self) -> int:  # type: ignore[override]  # read-only
        """The rank of this one."""
        return self._topology.rank

    @property
    def _topology(self) -> Topology:
        if not self._alone and is_initialized():
            self._position = topology()  # else, after shutdown(), the last one
        return self._position

    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls ``function`` on this process's replica."""
        several = self.count > 1
        synchronized = synchronized_torch_objects(self.first) if several else nullcontext()
        windows = windows_of_any_rows() if several else nullcontext()
        context = ReplicaContext(strategy, self.first)
        with enter_scope(strategy, context), synchronized, windows, tensorflow_numbers_of(self.first):
            return function(*select(0, tuple(args)), **select(0, dict(kwargs)))

    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """Reduces over ``axis`` on the host, then over the processes."""
        value = select(0, value)
        if axis is None:
            return self._allreduce(op, value, "reduce")
        return map_structure(lambda leaf: self._reduce(op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Gathers each leaf."""
        return self.all_gather(select(0, value), axis)

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Reduces all leaves in one grouped allreduce."""
        return self._allreduce(op, value, "all_reduce")

    def all_gather(self, value: Any, axis: int) -> Any:
        """Gathers each leaf."""
        return map_structure(lambda leaf: self._gather(leaf, axis), value)

    def merge_call(
        self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls ``function`` on every process; ``reduce`` and ``gather`` in it combine the replicas."""
        with enter_scope(strategy):
            return function(strategy, *args, **kwargs)

    def _allreduce(self, op: ReduceOp, value: Any, name: str) -> Any:
        if self.count == 1:
            return value
        leaves: list[Any] = []
        map_structure(leaves.append, value)
        reduced = iter(ops.grouped_allreduce([_meanable(op, leaf) for leaf in leaves], op.engine_op, name=name))
        return map_structure(lambda _: next(reduced), value)

    def _reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int]) -> Any:
        value = _meanable(op, value)
        adapter = adapter_of(value)
        spec = adapter.spec(value)
        axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
        for each in axes:
            _check_axis("reduce", spec.shape, each, "pass axis=None for scalars.")
        axes = tuple(each % len(spec.shape) for each in axes)
        rest = tuple(n for dimension, n in enumerate(spec.shape) if dimension not in axes)

        def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
            (host,) = hosts
            total, count = host.sum(axis=axes), np.asarray(math.prod(host.shape[each] for each in axes))
            if self.count > 1:
                communicator = global_process_set.communicator
                total, count = communicator.grouped_allreduce([total, count], Reduction.SUM, name="reduce")
            return [np.asarray(total / max(int(count), 1) if op is ReduceOp.MEAN else total, spec.dtype)]

        (result,) = adapter.host_call(on_host, [value], [ArraySpec(rest, spec.dtype)])
        return result

    def _gather(self, value: Any, axis: int) -> Any:
        if adapter_of(value).rows_of(value) is not None:
            raise ConfigError(
                f"gather: {type(value).__name__} cannot be gathered, as in tf.distribute: gather its values and its "
                "indices, or reduce it with SUM."
            )
        spec = adapter_of(value).spec(value)
        _check_axis("gather", spec.shape, axis, "reshape scalars to arrays first.")
        if self.count == 1:
            return value
        if spec.dtype.kind in "OSU":
            return _gather_strings(value, spec, axis)
        return ops.allgather(value, axis=axis, name="gather")


def _meanable(op: ReduceOp, value: Any) -> Any:
    """Returns integers as floating-point numbers, for a mean."""
    if op is not ReduceOp.MEAN or isinstance(value, (bool, int, float)):
        return value
    adapter = adapter_of(value)
    if adapter.rows_of(value) is not None:
        return value
    return adapter.cast(value, adapter.widest_float) if adapter.spec(value).dtype.kind in "iub" else value


def _gather_strings(value: Any, spec: ArraySpec, axis: int) -> Any:
    def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
        return [np.concatenate(allgather_object(np.asarray(hosts[0]), name="gather"), axis)]

    axis %= len(spec.shape)
    shape = tuple(None if dimension == axis else n for dimension, n in enumerate(spec.shape))
    (result,) = adapter_of(value).host_call(on_host, [value], [ArraySpec(shape, spec.dtype)])
    return result


def _check_axis(method: str, shape: tuple[int | None, ...], axis: int, advice: str) -> None:
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(
            f"{method}(axis={axis}): the value has the shape {shape}, which has no such dimension: {advice}"
        )
