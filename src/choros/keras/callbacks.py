"""Horovod's callbacks for ``model.fit``, on all frameworks."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from choros.comm import Reduction, global_process_set, topology
from choros.errors import ConfigError
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import RankProgress, page, read_page
from choros.training.callbacks import (
    BroadcastGlobalVariablesCallback,
    EpochCallback,
    MetricAverageCallback,
)
from choros.training.distributed_optimizer import reducer_of
from choros.training.keras_internals.models import innermost, learning_rate_of, velocities_of
from choros.training.metrics import count_examples
from choros.training.run_state import ElasticCallback
from choros.training.tensorboard import TensorBoard

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "ElasticCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "TensorBoard",
    "Throughput",
]


#: The parts of steps in logs.
_SHARES = ("computing", "loading", "waiting", "exchanging", "committing")


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


class LearningRateScheduleCallback(EpochCallback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the rate that is multiplied; ``None`` for the optimizer's rate when training begins.
        multiplier: a number, a factor in all of these epochs, or a function of the epoch, a fraction if ``staircase``
            is false.
        start_epoch: the first epoch, counted from 0, in which the rate is set.
        end_epoch: the first epoch after it in which the rate is not set; ``None`` for no end.
        staircase: whether to set the rate once per epoch, instead of before every batch.
        momentum_correction: whether to scale SGD's velocity when the rate changes, so that past gradients
            keep their weight (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, remark 3).
        steps_per_epoch: batches per epoch; ``None`` for the number that ``fit`` knows, of the rank with most batches.

    Example:
        >>> halve = LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5 ** (epoch // 30))
        >>> halve.rate_at(60)
        0.025
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier
        self._epoch = 0
        self._batches: float = steps_per_epoch or math.inf

    def rate_at(self, epoch: float) -> float:
        """The learning rate at ``epoch``."""
        factor = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        return (self.initial_lr or 0.0) * factor

    def on_train_begin(self, logs: Any = None) -> None:
        """Determines the values of arguments that are ``None``."""
        super().on_train_begin(logs)
        rate = learning_rate_of(innermost(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                "the optimizer's learning rate is a schedule, which a callback cannot set: create the optimizer with a "
                "number as its learning rate."
            )
        if self.initial_lr is None:
            self.initial_lr = float(rate.numpy())
        if not self.staircase:
            self._batches = self.steps_per_epoch or self._most_steps()
            if not self._batches:
                raise ConfigError(
                    f"{type(self).__name__} sets the rate before every batch and needs the number of batches per epoch,"
                    " which the data does not have: pass steps_per_epoch=…."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the rate of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        if self.staircase and self._is_active():
            self._set(self.rate_at(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the batch."""
        if not self.staircase and self._is_active():
            self._set(self.rate_at(self._epoch + batch / self._batches))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing; on JAX its existence keeps Keras from calling callbacks in other threads."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the rate to the logs."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _most_steps(self) -> int:
        """The number of batches of the rank that has most: rates are the same on all; 0 if the data have no number."""
        own, reducer = (self.params or {}).get("steps") or 0, reducer_of(self.model.optimizer)
        if reducer is None:
            return own
        communicator = reducer.process_set.communicator
        return int(communicator.allreduce(np.int64(own), Reduction.MAX, name="steps of an epoch"))

    def _is_active(self) -> bool:
        return self._epoch >= self.start_epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        previous = float(optimizer.learning_rate)
        if rate == previous:
            return
        optimizer.learning_rate = rate
        inner = innermost(optimizer)
        if self.momentum_correction and previous > 0 and getattr(inner, "momentum", None):
            for velocity in velocities_of(inner):
                velocity.assign(velocity * (rate / previous))


@final
class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    For a learning rate that was multiplied by the number of ranks (Goyal et al. 2017).

    Args:
        initial_lr: the rate after the warm-up; ``None`` for the optimizer's rate when training begins.
        warmup_epochs: the length of the warm-up.
        momentum_correction: see ``LearningRateScheduleCallback``.
        steps_per_epoch: batches per epoch; ``None`` for the number that ``fit`` knows.
        verbose: 1 prints a line on rank 0 at the end of the warm-up.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=5).rate_at(0)
        0.1
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr=initial_lr,
            multiplier=self._fraction,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _fraction(self, epoch: float) -> float:
        size = topology("LearningRateWarmupCallback").size
        # One batch ahead, so that the last batch of the warm-up has the full rate.
        progress = min(1.0, (epoch + 1 / self._batches) / self.warmup_epochs)
        return (1 + progress * (size - 1)) / size

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints a line at the end of the warm-up, if ``verbose``."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and topology().rank == 0:
            _print(
                f"Epoch {epoch + 1}: warm-up over, the learning rate is {float(self.model.optimizer.learning_rate):g}."
            )


@final
class BestModelCheckpoint(EpochCallback):
    """Saves the model on rank 0 whenever the monitored metric is the best so far.

    The file is written under a temporary name and then renamed, so that it is complete at any time.

    Args:
        monitor: the name of a metric in the logs.
        verbose: 1 prints a line when the model is saved.
        save_weights_only: whether to save only the weights (``….weights.h5``), not the whole model (``….keras``).
        mode: ``min``, ``max``, or ``auto``: larger is better for accuracies and AUCs, smaller for other metrics.
        save_freq: only ``"epoch"``: the metrics are known at the end of an epoch.
        filepath: the file's path; may contain ``{epoch}`` and names of metrics, as in Keras' ``ModelCheckpoint``. As
            in Horovod it may be set later: ``callback.filepath = …``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str = "epoch",
        *,
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode={mode!r}: expected one of auto, min, max.")
        if save_freq != "epoch":
            raise ConfigError(f"save_freq={save_freq!r}: expected 'epoch', as the metrics are known once per epoch.")
        larger = mode == "max" or (mode == "auto" and ("acc" in monitor or "auc" in monitor.lower()))
        self.filepath = filepath
        self.monitor = monitor
        self.verbose = verbose
        self.save_weights_only = save_weights_only
        self._is_better = np.greater if larger else np.less
        self.best = -np.inf if larger else np.inf

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that there is a path, before an epoch has been trained."""
        if self.filepath is None:
            raise ConfigError("BestModelCheckpoint needs the path of the file to save: pass filepath='….keras'.")
        super().on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves the model if this epoch was the best."""
        super().on_epoch_end(epoch, logs)
        if self.monitor not in (logs or {}):
            raise ConfigError(
                f"monitor={self.monitor!r}: the logs have no such metric; choose one of {sorted(logs or {})}."
            )
        value = float(logs[self.monitor])
        if not self._is_better(value, self.best):
            return
        self.best = value
        if topology().rank == 0:
            path = Path(str(self.filepath).format(epoch=epoch + 1, **logs))
            path.parent.mkdir(parents=True, exist_ok=True)
            save = self.model.save_weights if self.save_weights_only else self.model.save
            save(path, overwrite=True)
            events.emit(Kind.CHECKPOINT, str(path))
            if self.verbose:
                _print(f"Epoch {epoch + 1}: {self.monitor} {value:.5g}, saved to {path}.")


@final
class Throughput(EpochCallback):
    """Measures the training examples per second of all ranks together, without validation.

    Adds ``images_per_s`` and ``epoch_s`` to the logs of each epoch, and what shares of its steps ranks spent:
    ``computing_share``, ``loading_share``, ``waiting_share``, ``exchanging_share`` and ``committing_share``
    (docs/verdict.md says what they are), means over all ranks and the same on every rank. So callbacks after it show
    them: ``TensorBoard``, those of W&B, MLflow and trackio, and ``CSVLogger``.

    Args:
        total_images: the number of examples that all ranks see in an epoch; 0 to count them.
        verbose: 1 prints a line per epoch on rank 0.

    Example:
        >>> Throughput(total_images=60000).total_images
        60000
    """

    def __init__(self, total_images: int = 0, verbose: int = 0) -> None:
        super().__init__()
        self.total_images = total_images
        self.verbose = verbose
        self._begin = 0.0
        self._done = RankProgress(-1)
        self._measured: dict[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        super().on_epoch_begin(epoch, logs)
        self._measured = None
        self._begin, self._done = time.perf_counter(), read_page(page.memory)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops the clock before validation."""
        super().on_test_begin(logs)
        self._measure()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the results to the logs."""
        super().on_epoch_end(epoch, logs)
        self._measure()
        measured = self._measured or {}
        if logs is not None:
            logs.update(measured)
        if self.verbose and topology().rank == 0:
            rate, seconds = measured["images_per_s"], measured["epoch_s"]
            _print(f"Epoch {epoch + 1}: {rate:,.0f} images/s ({rate * seconds:,.0f} in {seconds:.2f} s)")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: its clock is that of this process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def _measure(self) -> None:
        """Measures the images of all ranks, the seconds of the slowest, and what they spent them on."""
        if self._measured is not None:
            return
        communicator = global_process_set.communicator
        seconds = float(communicator.allreduce(time.perf_counter() - self._begin, Reduction.MAX))
        done, seconds = read_page(page.memory), max(seconds, 1e-9)
        spent = [getattr(done, name) - getattr(self._done, name) for name in ("seconds", *_SHARES)]
        own = np.array([float(count_examples(self.model)), *spent])
        counted, in_steps, *shares = communicator.allreduce(own, Reduction.SUM).tolist()
        if self._steps.is_spmd:  # the metrics of each rank have counted the examples of all
            counted /= communicator.size
        self._measured = {"images_per_s": float(self.total_images or counted) / seconds, "epoch_s": seconds}
        self._measured |= {
            f"{name}_share": each / (in_steps or 1.0) for name, each in zip(_SHARES, shares, strict=True)
        }
