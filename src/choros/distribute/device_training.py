"""Keras on this process's devices, on JAX. In ``fit``, ``choros.training.spmd_trainer`` computes the global batch
exactly, so nothing is averaged here; with ``run_eagerly=True`` or ``jit_compile=False`` one device is used. In
``strategy.run``, variables that a function reads and assigns are its inputs and outputs, as JAX needs to compile it::

    def step(x):                         variables in ──► ┌──────────┐
        loss = model(x) …                                 │ replica 0│ ──► out 0 ─┐
        metric.update_state(loss)                     ──► ├──────────┤            ├─ merged ──► assigned
        return loss                                       │ replica 1│ ──► out 1 ─┘
                                                      ──► └──────────┘
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from choros.data.kinds import are_arrays, kind_of
from choros.data.rows import check_global_batch, count_rows
from choros.distribute import datasets
from choros.distribute.device_collectives import Flow, ReplicaCollectives
from choros.distribute.replicas import Replicas
from choros.distribute.scope import enter_fit, in_replica
from choros.distribute.shares import BATCH
from choros.distribute.synchronous import distribute_optimizer, follow_seeds
from choros.distribute.training import KerasCall, Training
from choros.distribute.types import ReduceOp
from choros.training.spmd_trainer import SpmdTrainer

_AXIS = "batch"
#: All replicas apply the same updates to the variables of these.
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


@final
class DeviceTraining(Training):
    """Trains on several devices of this process."""

    follows_run = True

    def __init__(self, replicas: Replicas, devices: Sequence[Any]) -> None:
        self._replicas = replicas
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        self._patched: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow_seeds(self, generator: Any = None) -> None:
        """Makes it draw other numbers on each replica."""
        follow_seeds(generator, self._replicas)

    def optimizer_created(self, optimizer: Any) -> None:
        """Makes ``optimizer`` sum the replicas' gradients in ``run``."""
        distribute_optimizer(optimizer, self._replicas)
        _optimizers.add(optimizer)

    def combine_moments(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
        """Returns what combines the replicas' moments in their compiled step."""
        return self._combine_moments if in_replica() else None

    def compile(self, model: Any, call: KerasCall) -> None:
        """Compiles the model; patches it, the first time, to run its steps on all devices."""
        call.run()
        if model.optimizer is not None:
            self.optimizer_created(model.optimizer)
        if model not in self._patched:
            SpmdTrainer(model, self._mesh)
            self._patched.add(model)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        x = call["x"]
        rows = min(call["batch_size"] or BATCH, count_rows(x)) if are_arrays(x) else kind_of(x).batch_rows(x)
        if rows is not None:  # known without consuming data
            check_global_batch(rows, self._mesh.size)
        return self._run(call, "x", "validation_data")

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        return self._run(call, "x")

    predict = evaluate

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        if model.train_function is None:  # a later one may be the last of a data set
            check_global_batch(count_rows(call["x"]), self._mesh.size)
        return self._run(call)

    def test_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        return self._run(call)

    predict_on_batch = test_on_batch

    def _combine_moments(self, count: Any, mean: Any, squares: Any) -> tuple[Any, Any]:
        total, summed = self._replicas.all_reduce(ReduceOp.SUM, [count, count * mean])
        center = summed / total
        return center, self._replicas.all_reduce(ReduceOp.SUM, squares + count * (mean - center) ** 2) / total

    def _run(self, call: KerasCall, *data: str) -> Any:
        """Runs ``call`` with global batches in its arguments ``data``, some of which may be distributed data sets."""
        distributed = [name for name in data if datasets.is_distributed(call[name])]
        global_batches = {name: datasets.split_batches(call[name], self._replicas) for name in distributed}
        with enter_fit():
            return call.replaced(**global_batches).run()


def flow_of(function: Callable[..., Any], mesh: Mesh, per_replica: Sequence[Any], replicated: Sequence[Any]) -> Flow:
    """Returns the variables that ``function``, which takes a replica's collectives and values, reads and assigns."""
    recorder = _Recorder()

    def on_device(*values: Any) -> None:
        with recorder:
            function(ReplicaCollectives(), *values)

    everywhere = PartitionSpec()
    traced = jax.shard_map(on_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    # Variables that the function creates are initialised on leaving the outer scope, when nothing is traced any more.
    with keras.StatelessScope():
        jax.eval_shape(traced, per_replica, replicated)
    variables = tuple(recorder.seen.values())
    assigned = tuple(index for index, key in enumerate(recorder.seen) if key in recorder.state_mapping)
    of_optimizers = {id(variable) for optimizer in _optimizers for variable in optimizer.variables}
    same = {index for index in assigned if variables[index].trainable or id(variables[index]) in of_optimizers}
    return Flow(variables, assigned, frozenset(same), _Recorder)


class _Recorder(keras.StatelessScope):
    """Records variables read or assigned, by ``id``: they compare by value; a Keras scope, as Keras calls it."""

    def __init__(self, state_mapping: Any = None) -> None:
        super().__init__(state_mapping)
        self.seen: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.seen.setdefault(id(variable), variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.seen.setdefault(id(update[0]), update[0])
        super().add_update(update)
