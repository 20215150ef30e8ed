"""``KerasEstimator``: trains a Keras model on a DataFrame, and returns a model of Spark's.

::

    estimator = KerasEstimator(num_proc=4, store="/shared/work", model=model, optimizer="adam", loss="mse",
                               feature_cols=["features"], label_cols=["label"], batch_size=32, epochs=3)
    predicted = estimator.fit(df).transform(other)

Ranks train with ``fit`` under a strategy, so that they end with the weights of one process with the whole batch.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import cloudpickle

from choros.errors import ConfigError
from choros.parallel.structure import leaves
from choros.spark.parameters import COMMON, EstimatorModel, FitPlan, Predict, RowsEstimator
from choros.spark.rows import ParquetRows, local_path

__all__ = ["KerasEstimator", "KerasModel"]

_KERAS: Mapping[str, tuple[Any, str]] = {
    "custom_objects": (None, "custom objects by the names that the model's configuration uses"),
    "checkpoint_callback": (None, "a ModelCheckpoint, whose file, in the store, has the weights of the returned model"),
}


@final
class KerasEstimator(RowsEstimator, tables=[COMMON, _KERAS]):
    """Trains a Keras model on the rows of a DataFrame; its parameters have Horovod's names, see ``docs/spark.md``."""

    lacking = ("gradient_compression",)

    def _train(self, plan: FitPlan, rows: ParquetRows, held_out: ParquetRows | None) -> KerasModel:
        import keras

        model, objects, optimizer = self.value("model"), self.value("custom_objects") or {}, self.value("optimizer")
        if not model.built:
            raise ConfigError(
                "KerasEstimator: the model is not built: begin it with keras.Input(shape), or call build."
            )
        if optimizer is None and getattr(model, "optimizer", None) is None:
            raise ConfigError("KerasEstimator needs the parameter optimizer, or a model that is compiled.")
        if self.value("checkpoint_callback") is not None and plan.store.commits("") is None:
            raise ConfigError(
                "KerasEstimator: checkpoint_callback needs a store that is a path, not a URL: leave it out."
            )
        if optimizer is not None:
            optimizer = keras.optimizers.serialize(keras.optimizers.get(optimizer))
        batch = self.value("batch_size") * plan.size
        terms = {name: self.value(name) for name in ("loss", "loss_weights", "metrics")}
        given = {
            "model": saved(model),
            "floatx": keras.config.floatx(),
            "objects": {**_classes_of(terms), **objects},
            "optimizer": optimizer,
            "pickled": cloudpickle.dumps((terms, self.value("callbacks"), self.value("checkpoint_callback"))),
            "seed": self.value("random_seed"),
            "fit": {
                "batch_size": batch,
                "validation_batch_size": (self.value("val_batch_size") or self.value("batch_size")) * plan.size,
                "epochs": self.value("epochs"),
                "steps_per_epoch": self.value("train_steps_per_epoch"),
                "validation_steps": self.value("validation_steps_per_epoch"),
                "shuffle": self.value("shuffle"),
                "verbose": self.value("verbose"),
            },
        }
        call = partial(train, plan, rows, held_out, **given)
        weights, history, widths = plan.run(call, KERAS_BACKEND=keras.backend.backend())
        trained = loaded(given["model"], objects)
        trained.set_weights(weights)
        return KerasModel(
            model=trained,
            history=history,
            run_id=plan.run_id,
            widths=widths,
            custom_objects=objects,
            feature_cols=list(plan.features),
            label_cols=list(plan.labels),
        )


def _classes_of(terms: Any) -> dict[str, type]:
    """Returns the user's classes of losses and metrics, by which Keras unpickles their instances."""
    kinds = [type(each) for each in leaves(terms) if hasattr(each, "get_config")]
    return {kind.__name__: kind for kind in kinds if not kind.__module__.startswith("keras.")}


def train(
    plan: FitPlan,
    rows: ParquetRows,
    held_out: ParquetRows | None,
    *,
    model: bytes,
    floatx: str,
    objects: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    pickled: bytes,
    seed: int | None,
    fit: Mapping[str, Any],
) -> tuple[list[Any], dict[str, list[float]], tuple[int, ...]] | None:
    """Trains on a rank; returns, from the first one, the weights, the history and how many values each output has.
    ``fit`` has its arguments. ``pickled`` are those of ``compile``, the callbacks and the checkpoint's, which Keras
    unpickles only where it knows ``objects``.
    """
    import keras

    import choros.distribute as dist
    from choros.comm.context import rank
    from choros.keras.callbacks import LearningRateScheduleCallback

    keras.config.set_floatx(floatx)
    strategy = dist.MultiWorkerMirroredStrategy()
    if seed is not None:
        keras.utils.set_random_seed(seed)
    with keras.saving.custom_object_scope(dict(objects)):
        terms, callbacks, checkpoint = cloudpickle.loads(pickled)
    with strategy.scope():
        trained = loaded(model, objects, compile=optimizer is None)
        if optimizer is not None:
            trained.compile(keras.optimizers.deserialize(dict(optimizer), objects), **terms)
        rate = _scale_rate(trained.optimizer, plan.size)
    for callback in callbacks:
        if isinstance(callback, LearningRateScheduleCallback) and rate is not None:
            callback.initial_lr = rate  # what was given was meant for one rank, as in Horovod's estimators
    callbacks, checkpoint = _in_store(plan, callbacks, checkpoint)
    x, y, weights = _data(plan, trained, rows)
    validation = None if held_out is None else _data(plan, trained, held_out)
    history = trained.fit(x, y, sample_weight=weights, validation_data=validation, callbacks=callbacks, **fit)
    if rank() != 0:
        return None
    if checkpoint is not None:
        trained = keras.saving.load_model(checkpoint, objects, compile=False)
    widths = tuple(math.prod(each or 1 for each in output.shape[1:]) for output in trained.outputs)
    return trained.get_weights(), history.history, widths


def _scale_rate(optimizer: Any, size: int) -> float | None:
    """Multiplies the learning rate, as Horovod's estimators do, and returns it; a schedule stays as it is."""
    if isinstance(optimizer.get_config().get("learning_rate"), dict):
        return None
    rate = float(optimizer.learning_rate) * size
    optimizer.learning_rate = rate
    return rate


def _in_store(plan: FitPlan, callbacks: Sequence[Any], checkpoint: Any) -> tuple[list[Any], str | None]:
    """Returns the callbacks, which write into the store, and the file of the checkpoint."""
    import keras

    logs = local_path(plan.store.get_logs_path(plan.run_id))
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard) and logs is not None:
            callback.log_dir = logs
    path = local_path(plan.store.get_checkpoint_path(plan.run_id))
    if checkpoint is None or path is None:
        return [*callbacks], None
    file = f"{path}.keras"
    os.makedirs(os.path.dirname(file), exist_ok=True)
    checkpoint.filepath = file
    return [*callbacks, checkpoint], file


def _data(plan: FitPlan, model: Any, rows: ParquetRows) -> tuple[Any, Any, Any]:
    """Returns features, labels and weights as ``fit`` takes them, in the shapes of the model's inputs."""
    arrays = dict(zip(rows.columns, rows.arrays(), strict=True))
    shapes = [tuple(each.shape[1:]) for each in model.inputs]
    x = [shaped(arrays[name], shape) for name, shape in zip(plan.features, shapes, strict=True)]
    y = [arrays[name] for name in plan.labels]
    return _one_or_all(x), _one_or_all(y), arrays[plan.weights] if plan.weights else None


def _one_or_all(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def shaped(array: Any, shape: Sequence[int | None]) -> Any:
    """Returns rows in the shape of an input, which may have one unknown dimension."""
    return array.reshape(len(array), *(-1 if each is None else each for each in shape))


def saved(model: Any) -> bytes:
    """Returns a model as the bytes of its ``.keras`` file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.keras"
        model.save(path)
        return path.read_bytes()


def loaded(data: bytes, objects: Mapping[str, Any], *, compile: bool = False) -> Any:  # noqa: A002  (Keras' name)
    """Returns the model in the bytes of a ``.keras`` file."""
    import keras

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.keras"
        path.write_bytes(data)
        return keras.saving.load_model(path, dict(objects), compile=compile)


@final
class KerasModel(EstimatorModel):
    """What ``KerasEstimator.fit`` returns.

    Attributes:
        history: that of ``fit``, as Keras' ``History.history``.
        run_id: the run's name in the store.
    """

    def __init__(
        self,
        model: Any = None,
        history: Mapping[str, list[float]] | None = None,
        run_id: str | None = None,
        widths: tuple[int, ...] = (),
        custom_objects: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(model, history, run_id, widths, **given)
        self._objects = custom_objects or {}

    def keras(self) -> Any:
        """Returns the trained Keras model."""
        return self._model

    def predictor(self) -> Callable[[], Predict]:
        """Returns what loads the model in Spark's workers."""
        import keras

        return partial(_predictor, saved(self._model), self._objects, keras.backend.backend())


def _predictor(data: bytes, objects: Mapping[str, Any], backend: str) -> Predict:
    os.environ["KERAS_BACKEND"] = backend
    model = loaded(data, objects)

    def predict(*inputs: Any) -> Sequence[Any]:
        given = [shaped(each, tuple(known.shape[1:])) for each, known in zip(inputs, model.inputs, strict=True)]
        outputs = model.predict_on_batch(_one_or_all(given))
        return outputs if isinstance(outputs, list | tuple) else [outputs]

    return predict
