"""Training of Keras models on the devices of one process, on JAX.

Keras' own methods train, on Keras' own data; ``choros.training.spmd_trainer`` runs each step on all devices and
computes the global batch exactly, whatever its size. So neither gradients nor metrics are averaged here.
A model that is compiled with ``run_eagerly=True`` or ``jit_compile=False`` stays on one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from choros.distribute import datasets
from choros.distribute.devices.keras_flow import share_variables_of
from choros.distribute.fit.call import KerasCall
from choros.distribute.fit.gradients import distribute_optimizer
from choros.distribute.fit.random_numbers import follow_seeds
from choros.distribute.fit.training import Training
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replicas import Replicas
from choros.distribute.scope import enter_fit, in_replica
from choros.errors import ConfigError
from choros.parallel.data import are_arrays, check_global_batch, count_rows, kind_of
from choros.training.spmd_trainer import Peers, SpmdTrainer

__all__ = ["DeviceTraining"]

#: Keras' default batch size for arrays.
_BATCH = 32
_AXIS = "batch"


@final
class DeviceTraining(Training):
    """Trains on several devices of this process.

    Args:
        replicas: those of the strategy.
        devices: the JAX devices of these replicas.
    """

    follows_run = True

    def __init__(self, replicas: Replicas, devices: Sequence[Any]) -> None:
        self._replicas = replicas
        self._mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
        self._patched: weakref.WeakSet[Any] = weakref.WeakSet()

    def variable_created(self, variable: Any) -> None:
        """Does nothing: all replicas share one copy."""

    def model_created(self, model: Any) -> None:
        """Does nothing: the model is patched when it is compiled."""

    def metric_created(self, metric: Any) -> None:
        """Does nothing: ``run`` sums the replicas' updates itself."""

    def seed_generator_created(self, generator: Any) -> None:
        """Makes it draw other numbers on each replica."""
        follow_seeds([generator], self._replicas)

    def seed_generators_used(self) -> None:
        """Makes Keras' own generator draw other numbers on each replica."""
        follow_seeds(None, self._replicas)

    def optimizer_created(self, optimizer: Any) -> None:
        """Makes ``optimizer`` sum the replicas' gradients in ``run``."""
        distribute_optimizer(optimizer, self._replicas)
        share_variables_of(optimizer)

    def combine_moments(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
        """Returns what combines the replicas' moments in their compiled step."""
        return self._combine_moments if in_replica() else None

    def compile(self, model: Any, call: KerasCall) -> None:
        """Compiles the model; patches it, the first time, to run its steps on all devices."""
        call.run()
        if model.optimizer is not None:
            self.optimizer_created(model.optimizer)
        if model not in self._patched:
            SpmdTrainer(model, self._mesh, _SingleProcess(), lambda: True)
            self._patched.add(model)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        rows = _rows_of_batches(call["x"], call["batch_size"])
        if rows is not None:
            check_global_batch(rows, self._mesh.size)
        return self._run(call, "x", "validation_data")

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        return self._run(call, "x")

    predict = evaluate

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        check_global_batch(count_rows(call["x"]), self._mesh.size)
        return self._run(call)

    def test_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        return self._run(call)

    predict_on_batch = test_on_batch

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Writes."""
        return write()

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


@final
class _SingleProcess(Peers):
    """The only process of the mesh."""

    def agree(self, layout: str, examples: int, problem: ConfigError | None) -> Sequence[int]:
        """Returns this process's own number of examples; raises its own error."""
        if problem is not None:
            raise problem
        return (examples,)

    def share(self, number: float, root: int) -> float:
        """Returns the number itself."""
        return number


def _rows_of_batches(data: Any, batch_size: int | None) -> int | None:
    """Returns the rows of a full batch, if they are known without consuming data."""
    if are_arrays(data):
        return min(batch_size or _BATCH, count_rows(data))
    return kind_of(data).batch_rows(data)
