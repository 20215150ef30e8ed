"""``TorchEstimator``: trains a module of PyTorch on a DataFrame, and returns a model of Spark's.

::

    estimator = TorchEstimator(num_proc=4, store="/shared/work", model=model, optimizer=optimizer, loss=nn.MSELoss(),
                               input_shapes=[[-1, 8]], feature_cols=["features"], label_cols=["label"], epochs=3)
    predicted = estimator.fit(df).transform(other)

A loss is the mean over its rows. Each rank weighs that of its rows of a batch by their number, so that ranks end with
the weights of one process with the whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, final

import cloudpickle
import numpy as np

from choros.errors import ConfigError
from choros.parallel.structure import map_structure
from choros.spark.parameters import COMMON, EstimatorModel, FitPlan, Predict, RowsEstimator, with_parameters
from choros.spark.rows import ParquetRows

__all__ = ["TorchEstimator", "TorchModel"]

_TORCH: Mapping[str, tuple[Any, str]] = {
    "input_shapes": (None, "the shapes of the inputs, with -1 for the rows; default: those of the columns"),
    "backward_passes_per_step": (1, "number of batches for each update"),
}


@final
@with_parameters(COMMON, _TORCH)
class TorchEstimator(RowsEstimator):
    """Trains a module on the rows of a DataFrame; its parameters have Horovod's names, see ``docs/spark.md``. Inputs
    and labels are float32, as in Horovod.
    """

    lacking = ("callbacks", "sample_weight_col", "val_batch_size", "validation_steps_per_epoch")

    def _train(self, plan: FitPlan, rows: ParquetRows, held_out: ParquetRows | None) -> TorchModel:
        losses = self.value("loss")
        losses = losses if isinstance(losses, list | tuple) else [losses]
        if self.value("optimizer") is None or not all(map(callable, losses)):
            raise ConfigError("TorchEstimator needs the parameters optimizer, and loss, which is a function or more.")
        weights = self.value("loss_weights") or [1 / len(plan.labels)] * len(plan.labels)
        shapes = self.value("input_shapes")
        task = TorchTask(
            plan,
            rows,
            held_out,
            cloudpickle.dumps((self.value("model"), self.value("optimizer"))),
            losses,
            weights,
            None if shapes is None else tuple(map(tuple, shapes)),
            self.value("batch_size") * plan.size,
            **{each.name: self.value(each.name) for each in fields(TorchTask) if each.name in self.defaults},
        )
        commits = plan.store.commits(plan.run_id)
        data, history, widths = plan.backend.run(train, (task,), env=plan.env, commit_dir=commits)[0]
        model, optimizer = cloudpickle.loads(data)
        return TorchModel(
            model=model,
            optimizer=optimizer,
            history=history,
            run_id=plan.run_id,
            widths=widths,
            input_shapes=task.shapes,
            feature_cols=list(plan.features),
            label_cols=list(plan.labels),
        )


@dataclass(frozen=True)
class TorchTask:
    """What each rank of a ``TorchEstimator`` does; from ``metrics`` on, the estimator's parameters of these names."""

    plan: FitPlan
    rows: ParquetRows
    held_out: ParquetRows | None
    pickled: bytes
    losses: Sequence[Callable[..., Any]]
    weights: Sequence[float]
    shapes: tuple[tuple[int, ...], ...] | None
    batch: int
    metrics: Sequence[Callable[..., Any]]
    epochs: int
    train_steps_per_epoch: int | None
    shuffle: bool
    random_seed: int | None
    backward_passes_per_step: int
    gradient_compression: Any
    verbose: int


def train(task: TorchTask) -> tuple[bytes, list[dict[str, Any]], tuple[int, ...]] | None:
    """Trains on a rank; the first returns pickled model and optimizer, history, and each output's number of values."""
    import torch

    import choros.torch as hvd

    hvd.init()
    if task.random_seed is not None:
        torch.manual_seed(task.random_seed)
    model, inner = cloudpickle.loads(task.pickled)
    device = _device(hvd.local_rank())
    model.to(device)
    for group in inner.param_groups:
        group["lr"] *= task.plan.size
    given = {} if task.gradient_compression is None else {"compression": task.gradient_compression}
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=task.backward_passes_per_step,
        **given,
    )
    data = _RankBatches(task, task.rows, device, task.train_steps_per_epoch)
    held_out = None if task.held_out is None else _RankBatches(task, task.held_out, device)

    @hvd.elastic.run
    def epochs(state: Any) -> None:
        while state.epoch < task.epochs:
            record: dict[str, Any] = {"epoch": state.epoch, "train": _pass(task, model, data, state.epoch, optimizer)}
            if held_out is not None:
                with torch.no_grad():
                    record["validation"] = _pass(task, model, held_out, state.epoch, None)
            if task.verbose and hvd.rank() == 0:
                print(record, flush=True)  # noqa: T201  (as Horovod's does)
            state.history, state.widths = [*state.history, record], data.widths
            state.epoch += 1
            state.commit()

    state: Any = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, history=[], widths=())
    epochs(state)
    if hvd.rank() != 0:
        return None
    # The driver may have no GPU.
    on_cpu = map_structure(lambda leaf: leaf.cpu() if torch.is_tensor(leaf) else leaf, inner.state_dict())
    return cloudpickle.dumps((model.cpu(), on_cpu)), state.history, state.widths


def _device(local_rank: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda")


@final
class _RankBatches:
    """The rank's rows of each global batch."""

    def __init__(self, task: TorchTask, rows: ParquetRows, device: Any, steps: int | None = None) -> None:
        self._task, self._device, self._steps = task, device, steps
        self._arrays = dict(zip(rows.columns, rows.arrays(), strict=True))
        self._rows = len(next(iter(self._arrays.values())))
        #: How many values each output of the model has for a row, known after a batch.
        self.widths: tuple[int, ...] = ()

    def __len__(self) -> int:
        number = -(-self._rows // self._task.batch)
        return number if self._steps is None else min(number, self._steps)

    def of_epoch(self, epoch: int, *, shuffle: bool) -> Iterator[tuple[list[Any], list[Any], int, float]]:
        """Yields inputs, labels, how many rows these are, and by what their mean loss is weighed. A rank without rows
        of a batch gets one, which counts nothing, as all ranks make the same steps.
        """
        import choros.torch as hvd
        from choros.data.rows import order_of
        from choros.topology import shard_range

        order = order_of(self._rows, self._task.random_seed or 0, epoch) if shuffle else np.arange(self._rows)
        for first in range(0, len(self) * self._task.batch, self._task.batch):
            indices = order[first : first + self._task.batch]
            start, end = shard_range(len(indices), hvd.rank(), hvd.size())
            own = indices[start:end] if end > start else indices[:1]
            labels = [self._tensor(name, own) for name in self._task.plan.labels]
            yield self._inputs(own), labels, end - start, (end - start) * hvd.size() / len(indices)

    def _inputs(self, own: Any) -> list[Any]:
        found = [self._tensor(name, own) for name in self._task.plan.features]
        shapes = self._task.shapes
        return found if shapes is None else [each.reshape(shape) for each, shape in zip(found, shapes, strict=True)]

    def _tensor(self, name: str, own: Any) -> Any:
        import torch

        return torch.from_numpy(np.asarray(self._arrays[name][own], dtype="float32")).to(self._device)


def _pass(task: TorchTask, model: Any, batches: _RankBatches, epoch: int, optimizer: Any) -> dict[str, float]:
    """Trains for an epoch, or without an optimizer validates; returns the mean loss and metrics over all rows."""
    import torch

    import choros.torch as hvd

    model.train(optimizer is not None)
    sums: Counter[Any] = Counter()
    shuffled = batches.of_epoch(epoch, shuffle=task.shuffle and optimizer is not None)
    for number, (inputs, labels, rows, share) in enumerate(shuffled, 1):
        outputs = _outputs(model(*inputs))
        batches.widths = tuple(each.numel() // len(each) for each in outputs)
        like = [_like(label, output) for label, output in zip(labels, outputs, strict=True)]
        loss = _loss(task, outputs, like)
        if optimizer is not None:
            (loss * share).backward()
            if number % task.backward_passes_per_step == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        named = {getattr(each, "__name__", type(each).__name__): each for each in task.metrics}
        measured = {name: float(metric(outputs[0], like[0])) for name, metric in named.items()}
        sums.update({name: rows * value for name, value in {"loss": loss.item(), **measured, "rows": 1}.items()})
    total = hvd.allreduce(torch.tensor(list(sums.values()), dtype=torch.float64), op=hvd.Sum, name="sums").tolist()
    return {name: value / total[-1] for name, value in zip(sums, total, strict=True) if name != "rows"}


def _loss(task: TorchTask, outputs: Sequence[Any], labels: Sequence[Any]) -> Any:
    """Returns the weighted sum of the labels' losses; a single loss is that of each label."""
    losses = task.losses if len(task.losses) > 1 else [task.losses[0]] * len(labels)
    terms = zip(losses, task.weights, outputs, labels, strict=True)
    return sum(weight * loss(output, label) for loss, weight, output, label in terms)


def _outputs(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def _like(label: Any, output: Any) -> Any:
    """Returns a label in the shape of an output with as many values, as Horovod does."""
    return label.reshape(output.shape) if label.numel() == output.numel() else label


@final
class TorchModel(EstimatorModel):
    """What ``TorchEstimator.fit`` returns.

    Attributes:
        history: a dictionary for each epoch, with its means over all rows.
        run_id: the run's name in the store.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        run_id: str | None = None,
        widths: tuple[int, ...] = (),
        input_shapes: Sequence[Sequence[int]] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(model, history, run_id, widths, **given)
        self._optimizer, self._shapes = optimizer, input_shapes

    def getOptimizerState(self) -> Any:  # noqa: N802
        """Returns the state of the optimizer."""
        return self._optimizer

    def predictor(self) -> Callable[[], Predict]:
        """Returns what loads the module in Spark's workers."""
        return partial(_predictor, cloudpickle.dumps(self._model), self._shapes)


def _predictor(pickled: bytes, shapes: Sequence[Sequence[int]] | None) -> Predict:
    import torch

    model = cloudpickle.loads(pickled).eval()

    def predict(*inputs: Any) -> Sequence[Any]:
        given = [torch.from_numpy(np.asarray(each, dtype="float32")) for each in inputs]
        if shapes is not None:
            given = [each.reshape(tuple(shape)) for each, shape in zip(given, shapes, strict=True)]
        with torch.no_grad():
            return [each.numpy() for each in _outputs(model(*given))]

    return predict
