"""The roads on which a script trains: alone, or on the ranks of a job. Nothing else of a script depends on them.

With Keras' ``fit`` a road decides where models and optimizers are made, and what ``fit`` receives::

                    Plain                Horovod                            Strategy
    scope()         –                    –                                  strategy.scope()
    optimizer(o)    o                    hvd.DistributedOptimizer(o)        o
    fit(model, …)   model.fit(…)         of hvd.shard(…), with callbacks    model.fit(…)

In a loop of one's own it decides which rows a step receives, what its loss divides by and how gradients are reduced::

    batches(…)      all rows             the rank's rows of each batch; in the last one, maybe none
    run(step)       step()               step()                             strategy.run(step)
    average(l)      the mean             of the rank's rows, or of the      nn.compute_average_loss(l)
                                         global batch (PyTorch)
    gradient(…)     tape.gradient(…)     of a distributed tape              tape.gradient(…)
    torch(o), optax(o)  o                hvd.DistributedOptimizer(o), …     o, after all_reduce of the gradients
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

import choros
from choros import distribute, nn

__all__ = ["BACKEND", "ROADS", "Horovod", "Plain", "Road", "Strategy"]

BACKEND = keras.backend.backend()


class Road(ABC):
    """How a script trains.

    Attributes:
        ranks: the number of processes that share each batch.
    """

    ranks = 1

    def scope(self) -> AbstractContextManager[Any]:
        """Models and optimizers are made in this context."""
        return contextlib.nullcontext()

    def optimizer(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Returns what ``compile`` receives."""
        return optimizer

    def share(self, data: Any, batch_size: int | None = None, *, batched: bool = True) -> Any:
        """Returns what ``fit`` receives of a data set of global batches; of ``tf.data`` with the size of a batch.

        Args:
            data: the data set.
            batch_size: that of ``tf.data``.
            batched: ``False``: the data set has single examples.
        """
        return data if batched else data.batch(batch_size)

    def fit(self, model: keras.Model, data: Any, batch_size: int | None = None, **arguments: Any) -> np.ndarray:
        """Trains on arrays, or on a data set; returns the history of all metrics.

        Args:
            model: was compiled.
            data: ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays; without a batch size what ``share`` returns.
            batch_size: the number of rows of a global batch.
            **arguments: of ``fit``.
        """
        given = data if batch_size is not None and isinstance(data, tuple) else (data,)
        x, y, weight = (*given, None, None)[:3]
        history = model.fit(x, y, batch_size, sample_weight=weight, shuffle=False, verbose=0, **arguments)
        return values_of(history)

    # loops ------------------------------------------------------------------------------------------

    def batches(self, arrays: Sequence[np.ndarray], batch_size: int) -> Iterable[tuple[Any, ...]]:
        """Yields the rows of each global batch on which this process trains; maybe none."""
        rows = [slice(start, start + batch_size) for start in range(0, len(arrays[0]), batch_size)]
        return [tuple(map(keras.ops.convert_to_tensor, self._own(*(array[each] for array in arrays)))) for each in rows]

    def _own(self, *rows: np.ndarray) -> tuple[np.ndarray, ...]:
        return rows

    def run(self, step: Callable[..., Any], batch: tuple[Any, ...]) -> float:
        """Calls a step, which returns an ``average``; returns that of the global batch."""
        return float(step(*batch))

    @abstractmethod
    def average(self, losses: Any) -> Any:
        """Returns the loss whose gradient a step computes, from one number for each row."""

    def gradient(self, tape: Any, loss: Any, variables: Sequence[Any], rows: Any) -> list[Any]:
        """Returns the gradient of TensorFlow's tape; ``rows`` is the number of rows of the step."""
        del rows
        return tape.gradient(loss, variables)

    def torch(self, optimizer: Any, *models: Any) -> Any:
        """Returns an optimizer of PyTorch that reduces gradients."""
        return optimizer

    def optax(self, optimizer: Any, name: str = "") -> Any:
        """Returns a transformation of optax that reduces gradients; its ``update`` takes ``examples``."""
        import optax

        return optax.with_extra_args_support(optimizer)


class Plain(Road):
    """One process, without choros."""

    def average(self, losses):
        return keras.ops.mean(losses)


class Horovod(Road):
    """Horovod's interface: ``choros.keras``; in loops ``choros.tensorflow``, ``choros.torch`` and ``choros.jax``."""

    def __init__(self) -> None:
        self.ranks = choros.size()

    def optimizer(self, optimizer):
        import choros.keras as hvd

        return hvd.DistributedOptimizer(optimizer)

    def share(self, data, batch_size=None, *, batched=True):
        import choros.keras as hvd

        return hvd.shard(data, batch_size=batch_size)

    def fit(self, model, data, batch_size=None, callbacks=(), **arguments):
        import choros.keras as hvd

        own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        if batch_size is not None:
            data = hvd.shard(data, batch_size=batch_size)
        return values_of(model.fit(data, shuffle=False, verbose=0, callbacks=[*own, *callbacks], **arguments))

    def _own(self, *rows):
        start, end = choros.shard_range(len(rows[0]), choros.rank(), choros.size())
        return tuple(each[start:end] for each in rows)

    def run(self, step, batch):
        import choros.keras as hvd

        rows = len(batch[0])
        loss = float(step(*batch))
        if BACKEND == "torch":  # the average of the ranks' numbers
            return float(hvd.allreduce(np.float64(loss)))
        return float(hvd.allreduce(np.float64(loss * rows), op=hvd.Sum) / hvd.allreduce(np.float64(rows), op=hvd.Sum))

    def average(self, losses):
        if BACKEND != "torch":
            return keras.ops.sum(losses) / max(len(losses), 1)  # gradients are weighted by the ranks' rows
        import choros.torch as hvd

        return losses.sum() * hvd.size() / hvd.allreduce(len(losses), op=hvd.Sum)

    def gradient(self, tape, loss, variables, rows):
        import choros.tensorflow as hvd

        return hvd.DistributedGradientTape(tape).gradient(loss, variables, examples=rows)

    def torch(self, optimizer, *models):
        import choros.torch as hvd

        named = [(f"{i}.{name}", each) for i, model in enumerate(models) for name, each in model.named_parameters()]
        for model in models:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(optimizer, named_parameters=named)

    def optax(self, optimizer, name=""):
        import choros.jax as hvd

        return hvd.distributed(optimizer, name=name)


class Strategy(Road):
    """tf.distribute's interface, ``choros.distribute``."""

    def __init__(self) -> None:
        self.strategy = distribute.MirroredStrategy()
        self.ranks = self.strategy.num_replicas_in_sync

    def scope(self):
        return self.strategy.scope()

    def batches(self, arrays, batch_size):
        batches = [tuple(array[i : i + batch_size] for array in arrays) for i in range(0, len(arrays[0]), batch_size)]
        if BACKEND == "tensorflow":
            import tensorflow as tf

            batches = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(batch_size)
        return self.strategy.experimental_distribute_dataset(batches)

    def run(self, step, batch):
        return float(self.strategy.reduce("SUM", self.strategy.run(step, args=tuple(batch)), axis=None))

    def average(self, losses):
        return nn.compute_average_loss(losses)

    def optax(self, optimizer, name=""):
        import optax

        def update(gradients, state, params=None, **_):
            return distribute.get_replica_context().all_reduce("SUM", gradients), state

        summed = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
        return optax.chain(summed, optimizer)


def values_of(history: Any) -> np.ndarray:
    return np.array([value for name in sorted(history.history) for value in history.history[name]])


#: The roads of a job, by their names in ``scripts.py``.
ROADS: Mapping[str, Callable[[], Road]] = {"horovod": Horovod, "strategy": Strategy}
