"""Local SGD and DiLoCo in ``fit``, with Keras' step; ``parallel/reduce/local_updates.py``: what ranks exchange."""

from typing import Any, final

import keras

from choros.arrays import adapter_of
from choros.comm import Array, ProcessSet, global_process_set
from choros.errors import ConfigError, NotInitializedError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.local_updates import LocalUpdates, OuterSGD
from choros.training.distributed_optimizer import reducer_of
from choros.training.keras_internals.fit import sync_jax_state
from choros.training.keras_internals.models import innermost
from choros.training.metrics import count_examples
from choros.training.trainer import model_variables
from choros.training.variables import broadcast_variables


def LocalSGDCallback(
    every: int,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> keras.callbacks.Callback:
    """Averages the ranks' weights every ``every`` steps, and at the end of each epoch.

    Ranks send the bytes of synchronous training divided by ``every``. All ranks start from rank 0's weights; each
    keeps its optimizer's state. Each rank's weights count by the examples it has trained on since the last average;
    ranks may have different numbers of batches. Put the callback before those that compare ranks, such as
    ``MetricAverageCallback``. Stich 2019, https://arxiv.org/abs/1805.09767.

    Args:
        every: the number of steps between two averages.
        compression: how the change of the weights is compressed.
        process_set: the ranks that train together; other ranks train alone.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: ``every`` is not a positive number; in ``fit``, the optimizer is a distributed one.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> callbacks = [hvd.LocalSGDCallback(every=8), hvd.callbacks.MetricAverageCallback()]
    """
    return _LocalUpdatesCallback(LocalUpdates(every, compressor=compression, process_set=process_set))


def DiLoCoCallback(
    every: int = 500,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> keras.callbacks.Callback:
    """Like ``LocalSGDCallback``, but the mean change of the weights is the gradient of an outer optimizer.

    With an outer momentum ranks can train independently for much longer. Defaults are the paper's, whose inner
    optimizer is AdamW (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).

    Args:
        every: the number of steps between two exchanges; ranks also exchange weights at the end of an epoch.
        outer_learning_rate: the learning rate of the outer SGD.
        outer_momentum: the momentum of the outer SGD.
        nesterov: whether that momentum is Nesterov's.
        compression: how the change of the weights is compressed.
        process_set: the ranks that train together; other ranks train alone.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument has an invalid value; in ``fit``, the optimizer is a distributed one.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> callback = hvd.DiLoCoCallback(every=100, compression=hvd.Compression.int8)
    """
    outer = OuterSGD(outer_learning_rate, outer_momentum, nesterov)
    return _LocalUpdatesCallback(LocalUpdates(every, outer, compressor=compression, process_set=process_set))


@final
class _LocalUpdatesCallback(keras.callbacks.Callback):
    """Passes each step to ``updates``, and assigns the resulting weights to the model."""

    def __init__(self, updates: LocalUpdates) -> None:
        super().__init__()
        included = updates.process_set.included()
        if included is None:
            raise NotInitializedError("a callback that exchanges weights")
        self._updates = updates
        self._included = included
        self._in_epoch = False
        self._batches = 0
        self._examples = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts all ranks from identical weights; the model and the optimizer are built by now."""
        optimizer = self.model.optimizer
        if reducer_of(optimizer) or reducer_of(innermost(optimizer)):
            raise ConfigError(
                "the optimizer is distributed, so ranks reduce gradients at every step: to average weights instead, "
                "compile the model with the plain optimizer."
            )
        if self._included:
            process_set = self._updates.process_set
            broadcast_variables(model_variables(self.model), process_set.ranks[0], process_set)
            self._updates.start(self._read())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the counts of batches and examples, as Keras does."""
        self._in_epoch = True
        self._batches, self._examples = 0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps, self._batches = batch + 1 - self._batches, batch + 1
        if self._included and self._updates.step(steps):
            sync_jax_state(self.model)
            self._write(self._updates.exchange(self._read(), examples=self._count()))

    def on_test_begin(self, logs: Any = None) -> None:
        """Ends the epoch's batches, in ``fit``."""
        self._end_batches()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_batches()

    def state_dict(self) -> dict[str, Any]:
        """What commits hold of it, besides the weights of the model."""
        return {"updates": self._updates.state_dict(), "batches": self._batches, "examples": self._examples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates.load_state_dict(state["updates"])
        self._batches, self._examples = state["batches"], state["examples"]

    def _end_batches(self) -> None:
        if self._included and self._in_epoch:
            self._in_epoch = False
            self._write(self._updates.finish(self._read(), examples=self._count()))

    def _count(self) -> int:
        """The number of examples since the last exchange; of batches, if the model has no loss metric that counts."""
        examples = count_examples(self.model) or self._batches
        new, self._examples = examples - self._examples, examples
        return new

    def _read(self) -> list[Array]:
        values = [variable.value for variable in self.model.trainable_variables]
        return [adapter_of(value).to_host(value) for value in values]

    def _write(self, weights: list[Array]) -> None:
        for variable, weight in zip(self.model.trainable_variables, weights, strict=True):
            variable.assign(weight)
