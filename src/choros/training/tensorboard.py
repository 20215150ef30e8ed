"""TensorBoard's event files on every framework, without TensorFlow.

::

    log_dir/train/events.out.tfevents.…          epoch_loss, epoch_accuracy, epoch_learning_rate, …    step: the epoch
                                                 dense/kernel/histogram                                step: the epoch
                                                 batch_loss, batch_steps_per_second, …                 step: the batch
                                                 keras                                                 the model's graph
    log_dir/validation/events.out.tfevents.…     epoch_loss, epoch_accuracy, …                         step: the epoch
                                                 evaluation_loss_vs_iterations, …                      step: the update

These are the names that ``keras.callbacks.TensorBoard`` writes, so runs of both can be compared.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, final

import keras

from choros.comm import is_initialized, topology
from choros.errors import ConfigError

__all__ = ["TensorBoard", "stand_in_for"]

_files = itertools.count()


@final
class TensorBoard(keras.callbacks.Callback):
    """Logs metrics, and what else is asked for, for TensorBoard (``keras.callbacks.TensorBoard``, without TensorFlow).

    Rank 0 writes; put it after ``MetricAverageCallback``, so that what it writes holds for all ranks. What it writes of
    single batches is of rank 0's part. View it with ``pip install tensorboard`` and ``tensorboard --logdir logs``.

    Args:
        log_dir: the directory; an epoch's metrics go to ``train`` and ``validation`` in it.
        histogram_freq: every how many epochs to write histograms of the weights; 0 for never.
        write_graph: write the layers of a Sequential or functional model.
        write_steps_per_second: also write the steps of a second.
        update_freq: ``"epoch"``; ``"batch"`` or a number of batches also writes the metrics after so many.

    Raises:
        ConfigError: ``update_freq`` or ``histogram_freq`` cannot be meant.
        ImportError: tensorboardX is not installed.

    Example:
        >>> TensorBoard("logs", update_freq="batch").update_freq
        1
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        *,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
    ) -> None:
        super().__init__()
        every: Any = 1 if update_freq == "batch" else update_freq
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise ConfigError(f"update_freq={update_freq!r}: expected 'epoch', 'batch' or a number of batches.")
        if histogram_freq < 0:
            raise ConfigError(f"histogram_freq={histogram_freq!r}: expected a number of epochs, or 0 for never.")
        _check_installed()
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = every
        # Where nothing happens after a batch, JAX need not wait for it.
        self.async_safe = every == "epoch" and not write_steps_per_second
        self._files: dict[str, _EventFile] = {}
        self._training = False
        self._batches = self._epoch_batches = 0
        self._batch_began = self._epoch_began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes the graph."""
        self._training, self._batches = True, 0
        if self.write_graph and type(self.model).__name__ in ("Functional", "Sequential"):
            try:
                layers = self.model.to_json()
            except (NotImplementedError, TypeError, ValueError) as error:  # a training must not end for it
                warnings.warn(f"TensorBoard shows no graph: the model cannot be written as JSON. {error}", stacklevel=2)
                return
            self._write("train", lambda file: file.graph(layers))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._epoch_batches, self._epoch_began = 0, time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the metrics so far, if it is time."""
        if self.async_safe:
            return
        self._batches += 1
        self._epoch_batches += 1
        if self.update_freq == "epoch" or self._batches % self.update_freq:
            return
        scalars = dict(logs or {})
        if self.write_steps_per_second:
            scalars["steps_per_second"] = 1 / max(time.perf_counter() - self._batch_began, 1e-9)
        self._write("train", lambda file: file.scalars("batch_{}", scalars, self._batches))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the epoch's metrics, and histograms if it is time."""
        logs = logs or {}
        held_out = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        scalars = {name: value for name, value in logs.items() if not name.startswith("val_")}
        scalars.update(_learning_rates(self.model.optimizer))
        if self.write_steps_per_second:
            scalars["steps_per_second"] = self._epoch_batches / max(time.perf_counter() - self._epoch_began, 1e-9)
        self._write("train", lambda file: file.scalars("epoch_{}", scalars, epoch))
        if held_out:
            self._write("validation", lambda file: file.scalars("epoch_{}", held_out, epoch))
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write("train", lambda file: file.histograms(self.model.weights, epoch))

    def on_test_end(self, logs: Any = None) -> None:
        """Writes what was found, over the number of updates so far."""
        iterations = getattr(self.model.optimizer, "iterations", None)
        if logs and iterations is not None:
            step = int(keras.ops.convert_to_numpy(iterations))
            self._write("validation", lambda file: file.scalars("evaluation_{}_vs_iterations", logs, step))
        if not self._training:
            self._close()

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the files."""
        self._training = False
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, write: Any) -> None:
        if is_initialized() and topology().rank != 0:
            return
        if name not in self._files:
            self._files[name] = _EventFile(os.path.join(self.log_dir, name))
        write(self._files[name])
        self._files[name].flush()


def stand_in_for(callback: Any) -> Any:
    """A ``TensorBoard`` that does what Keras' own ``callback`` is asked for, if that one cannot work here.

    Returns:
        ``callback`` itself, if it is something else, or if TensorFlow and the package tensorboard are installed.

    Raises:
        ConfigError: it is asked for what only TensorFlow can do.
        ImportError: tensorboardX is not installed.

    Example:
        >>> callback = keras.callbacks.EarlyStopping()
        >>> stand_in_for(callback) is callback
        True
    """
    if type(callback) is not keras.callbacks.TensorBoard or (_can_import("tensorflow") and _can_import("tensorboard")):
        return callback
    asked = {
        "write_images": callback.write_images,
        "embeddings_freq": callback.embeddings_freq,
        "profile_batch": callback._should_trace,
    }
    if missing := [name for name, value in asked.items() if value]:
        raise ConfigError(
            f"keras.callbacks.TensorBoard({', '.join(f'{name}=…' for name in missing)}) needs TensorFlow and its "
            "TensorBoard: pip install tensorflow tensorboard, or leave it out."
        )
    return TensorBoard(
        callback.log_dir,
        callback.histogram_freq,
        callback.write_graph,
        write_steps_per_second=callback.write_steps_per_second,
        update_freq=callback.update_freq,
    )


@final
class _EventFile:
    """A file of TensorBoard's ``Event`` records; what is written is there after ``flush``."""

    def __init__(self, directory: str) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        os.makedirs(directory, exist_ok=True)
        # tensorboardX names files by the second.
        self._writer = EventsWriter(os.path.join(directory, "events"), f".{os.getpid()}.{next(_files)}")

    def scalars(self, name: str, values: Mapping[str, Any], step: int) -> None:
        """Numbers; ``name`` has ``{}`` where their own names go."""
        from tensorboardX.summary import scalar

        for own, value in values.items():
            self._add(scalar(name.format(own), float(value)), step)

    def histograms(self, weights: Any, step: int) -> None:
        """What values each of a model's ``weights`` has."""
        from tensorboardX.summary import histogram

        for weight in weights:
            values = keras.ops.convert_to_numpy(weight.value)
            self._add(histogram(f"{weight.path}/histogram", values, bins="auto"), step)

    def graph(self, layers: str) -> None:
        """A Keras model as JSON, where TensorBoard looks for it."""
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboardX.proto.tensor_pb2 import TensorProto

        plugin = SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
        tensor = TensorProto(dtype="DT_STRING", string_val=[layers.encode()])
        value = Summary.Value(tag="keras", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._add(Summary(value=[value]), 0)

    def flush(self) -> None:
        """Has all that was written on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))


def _check_installed() -> None:
    try:
        importlib.import_module("tensorboardX")
    except ImportError as error:
        raise ImportError(
            "TensorBoard's files are written with tensorboardX: pip install 'choros[tensorboard]'."
        ) from error


def _can_import(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def _learning_rates(optimizer: Any) -> dict[str, Any]:
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "optimizers"):
        return {f"learning_rate_{each.name}": _number(each.learning_rate) for each in optimizer.optimizers}
    return {"learning_rate": _number(optimizer.learning_rate)} if optimizer is not None else {}


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
