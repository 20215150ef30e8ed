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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, final

import cloudpickle
import numpy as np

from choros.errors import ConfigError
from choros.parallel.structure import map_structure
from choros.spark.parameters import COMMON, EstimatorModel, FitPlan, Predict, RowsEstimator
from choros.spark.rows import ParquetRows

__all__ = ["TorchEstimator", "TorchModel"]

_TORCH: Mapping[str, tuple[Any, str]] = {
    "input_shapes": (None, "the shapes of the inputs, with -1 for the rows; default: those of the columns"),
    "backward_passes_per_step": (1, "number of batches for each update"),
}


@final
class TorchEstimator(RowsEstimator, tables=[COMMON, _TORCH]):
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
        data, history, widths = plan.run(partial(train, task))
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
    data = _arrays(task.rows)
    held_out = None if task.held_out is None else _arrays(task.held_out)

    @hvd.elastic.run
    def epochs(state: Any) -> None:
        while state.epoch < task.epochs:
            trained, widths = _pass(task, model, data, device, state.epoch, optimizer)
            record: dict[str, Any] = {"epoch": state.epoch, "train": trained}
            if held_out is not None:
                with torch.no_grad():
                    record["validation"], _ = _pass(task, model, held_out, device)
            if task.verbose and hvd.rank() == 0:
                print(record, flush=True)  # noqa: T201  (as Horovod's does)
            state.history, state.widths = [*state.history, record], widths
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


#: The columns of rows, by their names.
_Arrays = Mapping[str, np.ndarray[Any, Any]]


def _arrays(rows: ParquetRows) -> _Arrays:
    return dict(zip(rows.columns, rows.arrays(), strict=True))


def _pass(
    task: TorchTask, model: Any, arrays: _Arrays, device: Any, epoch: int = 0, optimizer: Any = None
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Trains for an epoch, or without an optimizer validates; returns the mean loss and metrics over all rows, and how
    many values each output of the model has for a row.
    """
    import torch

    import choros.torch as hvd
    from choros.data.rows import order_of

    model.train(optimizer is not None)
    rows = len(next(iter(arrays.values())))
    is_shuffled = task.shuffle and optimizer is not None
    order = order_of(rows, task.random_seed or 0, epoch) if is_shuffled else np.arange(rows)
    steps = None if optimizer is None else task.train_steps_per_epoch
    batches = [order[first : first + task.batch] for first in range(0, rows, task.batch)][:steps]
    sums: Counter[Any] = Counter()
    widths: tuple[int, ...] = ()
    for number, indices in enumerate(batches, 1):
        inputs, labels, count = _of_rank(task, arrays, indices, device)
        outputs = _outputs(model(*inputs))
        widths = tuple(each.numel() // len(each) for each in outputs)
        like = [_like(label, output) for label, output in zip(labels, outputs, strict=True)]
        loss = _loss(task, outputs, like)
        if optimizer is not None:
            (loss * (count * hvd.size() / len(indices))).backward()
            if number % task.backward_passes_per_step == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        named = {getattr(each, "__name__", type(each).__name__): each for each in task.metrics}
        measured = {name: float(metric(outputs[0], like[0])) for name, metric in named.items()}
        sums.update({name: count * value for name, value in {"loss": loss.item(), **measured, "rows": 1}.items()})
    total = hvd.allreduce(torch.tensor(list(sums.values()), dtype=torch.float64), op=hvd.Sum, name="sums").tolist()
    return {name: value / total[-1] for name, value in zip(sums, total, strict=True) if name != "rows"}, widths


def _of_rank(task: TorchTask, arrays: _Arrays, indices: Any, device: Any) -> tuple[list[Any], list[Any], int]:
    """Returns inputs and labels of this rank's rows of a batch, and how many rows these are. A rank without rows gets
    one, which counts nothing, as all ranks make the same steps.
    """
    import torch

    import choros.torch as hvd
    from choros.topology import shard_range

    start, end = shard_range(len(indices), hvd.rank(), hvd.size())
    own = indices[start:end] if end > start else indices[:1]

    def tensors(names: Sequence[str]) -> list[Any]:
        return [torch.from_numpy(np.asarray(arrays[name][own], dtype="float32")).to(device) for name in names]

    inputs, shapes = tensors(task.plan.features), task.shapes
    if shapes is not None:
        inputs = [each.reshape(shape) for each, shape in zip(inputs, shapes, strict=True)]
    return inputs, tensors(task.plan.labels), end - start


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
