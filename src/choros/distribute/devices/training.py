"""How models train whose replicas are the devices of one process, on JAX.

Keras' own methods do it, on Keras' own data: each step is led over the devices by ``choros.training.spmd_trainer``,
which computes the global batch exactly, whatever its size. So there is nothing to average, neither gradients nor
metrics.
A model that is compiled with ``run_eagerly=True`` or ``jit_compile=False`` stays on one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np

from choros.distribute import datasets
from choros.distribute.devices.keras_flow import share_variables_of
from choros.distribute.fit.call import Call
from choros.distribute.fit.gradients import distribute_optimizer
from choros.distribute.fit.training import Training
from choros.distribute.replicas import Replicas
from choros.distribute.scope import enter_fit
from choros.errors import ConfigError
from choros.parallel.data import are_arrays, check_global_batch, count_rows, kind_of
from choros.training.spmd_trainer import Peers, SpmdTrainer

__all__ = ["DeviceTraining"]

#: Keras' own, for arrays.
_BATCH = 32
_AXIS = "batch"


@final
class DeviceTraining(Training):
    """Trains on several devices of this process.

    Args:
        replicas: of the strategy.
        devices: JAX's, theirs.
    """

    def __init__(self, replicas: Replicas, devices: Sequence[Any]) -> None:
        self._replicas = replicas
        self._mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
        self._spmd_models: weakref.WeakSet[Any] = weakref.WeakSet()

    def variable_made(self, variable: Any) -> None:
        """Nothing: there is one of it."""

    def model_made(self, model: Any) -> None:
        """Nothing: it is caught when it is compiled."""

    def metric_made(self, metric: Any) -> None:
        """Nothing: what replicas add to it in ``run`` is added up there."""

    def checkpoint_made(self, checkpoint: Any) -> None:
        """Nothing: this process writes alone."""

    def checkpoint_manager_made(self, manager: Any) -> None:
        """Nothing: likewise."""

    def optimizer_made(self, optimizer: Any) -> None:
        """In ``run`` it sums the replicas' gradients."""
        distribute_optimizer(optimizer)
        share_variables_of(optimizer)

    def compile(self, model: Any, call: Call) -> None:
        """From the first time on, its steps run on all devices."""
        call.run()
        self.optimizer_made(model.optimizer)
        if model not in self._spmd_models:
            SpmdTrainer(model, self._mesh, _Alone(), lambda: True)
            self._spmd_models.add(model)

    def fit(self, model: Any, call: Call) -> Any:
        """As Keras does it."""
        rows = _rows_of_batches(call["x"], call["batch_size"])
        if rows is not None:
            check_global_batch(rows, self._mesh.size)
        return self._made(call, "x", "validation_data")

    def evaluate(self, model: Any, call: Call) -> Any:
        """As Keras does it."""
        return self._made(call, "x")

    predict = evaluate

    def train_on_batch(self, model: Any, call: Call) -> Any:
        """As Keras does it."""
        check_global_batch(count_rows(call["x"]), self._mesh.size)
        return self._made(call)

    def test_on_batch(self, model: Any, call: Call) -> Any:
        """As Keras does it."""
        return self._made(call)

    predict_on_batch = test_on_batch

    def save(self, model: Any, call: Call) -> None:
        """As Keras does it."""
        call.run()

    save_weights = save
    export = save

    def _made(self, call: Call, *data: str) -> Any:
        """Makes ``call`` with global batches in its arguments ``data``, of which some may have been dealt out."""
        dealt_out = [name for name in data if datasets.is_distributed(call[name])]
        together = {name: datasets.split_batches(call[name], self._replicas) for name in dealt_out}
        with enter_fit():
            return call.replaced(**together).run()


@final
class _Alone(Peers):
    """This process has all devices of the mesh."""

    def agree(self, layout: str, examples: int, problem: ConfigError | None) -> Sequence[int]:
        """With itself."""
        if problem is not None:
            raise problem
        return (examples,)

    def share(self, number: float, root: int) -> float:
        """The number."""
        return number


def _rows_of_batches(data: Any, batch_size: int | None) -> int | None:
    """The rows of a full batch, if that is known without consuming data."""
    if are_arrays(data):
        return min(batch_size or _BATCH, count_rows(data))
    return kind_of(data).batch_rows(data)
