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

import importlib
import itertools
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import keras

from choros.comm import is_initialized
from choros.errors import ConfigError
from choros.frameworks import is_installed
from choros.training.callbacks import is_first

_numbers = itertools.count()


@final
class TensorBoard(keras.callbacks.Callback):
    """Logs metrics, histograms and the graph for TensorBoard (``keras.callbacks.TensorBoard``, without TensorFlow).

    Rank 0 writes; put it after ``MetricAverageCallback``, so that the metrics are those of all ranks. Metrics of single
    batches are those of rank 0's shard. View them with ``pip install tensorboard`` and ``tensorboard --logdir logs``.

    Args:
        log_dir: the directory; an epoch's metrics go to ``train`` and ``validation`` in it.
        histogram_freq: epochs between histograms of the weights; 0 for never.
        write_graph: whether to write the layers of a Sequential or functional model.
        write_steps_per_second: whether to write the number of steps per second.
        update_freq: ``"epoch"``; with ``"batch"`` or a number of batches, metrics are also written that often.

    Raises:
        ConfigError: ``update_freq`` or ``histogram_freq`` is invalid.
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
        try:
            importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ImportError(
                "TensorBoard's files are written with tensorboardX: pip install 'choros[tensorboard]'."
            ) from error
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = every
        # If the callback does nothing after a batch, JAX need not wait for the batch.
        self.async_safe = every == "epoch" and not write_steps_per_second
        self._files: dict[str, Any] = {}
        self._training = False
        self._batches = self._epoch_batches = 0
        self._batch_began = self._epoch_began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes the graph."""
        self._training, self._batches = True, 0
        if self.write_graph and type(self.model).__name__ in ("Functional", "Sequential"):
            try:
                layers = self.model.to_json()
            except (NotImplementedError, TypeError, ValueError) as error:  # not a reason to stop training
                warnings.warn(f"TensorBoard shows no graph: the model cannot be written as JSON. {error}", stacklevel=2)
                return
            self._write("train", _graph(layers), 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._epoch_batches, self._epoch_began = 0, time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the metrics so far, every ``update_freq`` batches."""
        if self.async_safe:
            return
        self._batches += 1
        self._epoch_batches += 1
        if self.update_freq == "epoch" or self._batches % self.update_freq:
            return
        scalars = dict(logs or {})
        if self.write_steps_per_second:
            scalars["steps_per_second"] = 1 / max(time.perf_counter() - self._batch_began, 1e-9)
        self._write("train", _scalars("batch_{}", scalars), self._batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the epoch's metrics, and histograms every ``histogram_freq`` epochs."""
        logs = logs or {}
        held_out = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        scalars = {name: value for name, value in logs.items() if not name.startswith("val_")}
        scalars.update(_learning_rates(self.model.optimizer))
        if self.write_steps_per_second:
            scalars["steps_per_second"] = self._epoch_batches / max(time.perf_counter() - self._epoch_began, 1e-9)
        self._write("train", _scalars("epoch_{}", scalars), epoch)
        if held_out:
            self._write("validation", _scalars("epoch_{}", held_out), epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write("train", _histograms(self.model.weights), epoch)

    def on_test_end(self, logs: Any = None) -> None:
        """Writes the results of the evaluation, with the number of updates so far as the step."""
        iterations = getattr(self.model.optimizer, "iterations", None)
        if logs and iterations is not None:
            step = int(keras.ops.convert_to_numpy(iterations))
            self._write("validation", _scalars("evaluation_{}_vs_iterations", logs), step)
        if not self._training:
            self._close()

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the files."""
        self._training = False
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """The numbers of batches, which are the steps of what is written; its clocks are those of this process."""
        return {"batches": self._batches, "epoch_batches": self._epoch_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a ``state_dict``."""
        self._batches, self._epoch_batches = state["batches"], state["epoch_batches"]

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, summaries: Iterable[Any], step: int) -> None:
        if is_initialized() and not is_first():
            return
        if name not in self._files:
            from tensorboardX import FileWriter

            # tensorboardX names files by the second, so names need a suffix to be unique.
            suffix = f".{os.getpid()}.{next(_numbers)}"
            self._files[name] = FileWriter(os.path.join(self.log_dir, name), filename_suffix=suffix)
        for summary in summaries:
            self._files[name].add_summary(summary, step)
        self._files[name].flush()


def stand_in_for(callback: Any) -> Any:
    """A ``TensorBoard`` like Keras' ``callback``, if that cannot work here; ConfigError if options need TensorFlow.

    >>> callback = keras.callbacks.EarlyStopping()
    >>> stand_in_for(callback) is callback
    True
    """
    if type(callback) is not keras.callbacks.TensorBoard or all(map(is_installed, ("tensorflow", "tensorboard"))):
        return callback
    requested = {
        "write_images": callback.write_images,
        "embeddings_freq": callback.embeddings_freq,
        "profile_batch": callback._should_trace,
    }
    if missing := [name for name, value in requested.items() if value]:
        raise ConfigError(
            f"keras.callbacks.TensorBoard({', '.join(f'{name}=…' for name in missing)}) needs TensorFlow and its "
            "TensorBoard: pip install tensorflow tensorboard, or remove that argument."
        )
    return TensorBoard(
        callback.log_dir,
        callback.histogram_freq,
        callback.write_graph,
        write_steps_per_second=callback.write_steps_per_second,
        update_freq=callback.update_freq,
    )


def _scalars(name: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Summaries of numbers; ``name`` is a format in which ``{}`` stands for each number's own name."""
    from tensorboardX.summary import scalar

    for own, value in values.items():
        yield scalar(name.format(own), float(value))


def _histograms(weights: Any) -> Iterator[Any]:
    from tensorboardX.summary import histogram

    for weight in weights:
        yield histogram(f"{weight.path}/histogram", keras.ops.convert_to_numpy(weight.value), bins="auto")


def _graph(layers: str) -> Iterator[Any]:
    """The summary of a Keras model as JSON, under the tag that TensorBoard reads."""
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto

    plugin = SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
    tensor = TensorProto(dtype="DT_STRING", string_val=[layers.encode()])
    yield Summary(value=[Summary.Value(tag="keras", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)])


def _learning_rates(optimizer: Any) -> dict[str, Any]:
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "optimizers"):
        return {f"learning_rate_{each.name}": _number(each.learning_rate) for each in optimizer.optimizers}
    return {"learning_rate": _number(optimizer.learning_rate)} if optimizer is not None else {}


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
