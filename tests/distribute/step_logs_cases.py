"""What steps of the user's own return, and what callbacks decide, under a strategy and in plain Keras.

Run by ``test_step_logs.py`` on two ranks. The last of three batches has one row, of which one replica gets none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

import choros
from choros import distribute
from choros.errors import ConfigError, StrategyError
from ranks.reference import of_one_rank
from training.matrix_cases import apply_gradients

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"
X = np.random.default_rng(0).normal(size=(25, 3))  # float64, as Keras is often given
Y = X @ np.array([[1.0], [2.0], [-1.0]]) + 0.1
BATCH = 12


class Own(keras.Model):
    """Returns plain tensors, one by the name of a metric that it does not update."""

    def _loss(self, x: Any, y: Any, training: bool) -> Any:
        return keras.ops.mean(keras.ops.square(keras.ops.convert_to_tensor(y) - self(x, training=training)))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = apply_gradients(lambda: self._loss(x, y, True), self, self.optimizer)
        return {"loss": loss, "twice": 2 * loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self._loss(x, y, False)
        return {"loss": loss, "twice": 2 * loss}


def made(kind: Callable[..., keras.Model] = keras.Model, **given: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    model = kind(x, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.05), jit_compile=JIT, **given)
    return model


def check(make: Callable[[], keras.Model], use: Callable[[keras.Model], Any]) -> Any:
    """Compares what ``use`` returns, and the weights, with those of one process."""

    def results(model: keras.Model) -> Any:
        return use(model), model.get_weights()

    expected = of_one_rank(lambda: results(make()))
    with distribute.MirroredStrategy().scope():
        model = make()
    own = results(model)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), own, expected)
    return own


def fit(model: keras.Model, rows: int = 24, **given: Any) -> dict[str, list[float]]:
    arguments: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0} | given
    history: dict[str, list[float]] = model.fit(X[:rows], Y[:rows], **arguments).history
    return history


def case_what_a_step_returns_by_the_name_of_a_metric() -> None:
    def use(model: keras.Model) -> Any:
        x, y = X.astype("float32"), Y.astype("float32")
        batches = [model.train_on_batch(x[:8], y[:8], return_dict=True), model.test_on_batch(x[:5], y[:5])]
        history = fit(model, validation_data=(X[:BATCH], Y[:BATCH]))
        return batches, history, model.evaluate(X[:BATCH], Y[:BATCH], BATCH, verbose=0, return_dict=True)

    (_, history, _), _ = check(lambda: made(Own), use)
    assert set(history) == {"loss", "twice", "val_loss", "val_twice"}
    assert history["loss"][1] < history["loss"][0]


class Renamed(Own):
    """Returns what a metric has by another name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="error")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(super().train_step(data)["loss"])
        return {"own": self.tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(super().test_step(data)["loss"])
        return {"own": self.tracker.result()}


def case_what_a_step_returns_of_a_metric_by_another_name() -> None:
    def use(model: keras.Model) -> Any:
        history = fit(model, rows=25, validation_data=(X[:13], Y[:13]), validation_batch_size=BATCH)
        return history, model.evaluate(X, Y, BATCH, verbose=0, return_dict=True)

    (history, _), _ = check(lambda: made(Renamed), use)
    assert set(history) == {"own", "val_own"}


class Sums(keras.metrics.Metric):
    """Several numbers."""

    def __init__(self) -> None:
        super().__init__(name="sums")
        self.sums = self.add_weight(shape=(2,), initializer="zeros", name="sums")

    def update_state(self, predicted: Any) -> None:
        self.sums.assign_add(keras.ops.stack([keras.ops.sum(predicted), keras.ops.sum(keras.ops.square(predicted))]))

    def result(self) -> Any:
        return 1.0 * self.sums


class OfSeveral(Own):
    """Returns a metric of several numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums = Sums()

    @property
    def metrics(self) -> list[Any]:
        return [self.sums]

    def test_step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.sums.update_state(self(x, training=False))
        return super().test_step(data) | {"sums": self.sums.result()}


def case_a_metric_of_several_numbers_that_a_step_returns() -> None:
    def use(model: keras.Model) -> Any:
        x, y = X.astype("float32"), Y.astype("float32")
        logs = [model.test_on_batch(x[:rows], y[:rows], return_dict=True) for rows in (8, 1)]
        return logs, model.evaluate(X[:BATCH], Y[:BATCH], BATCH, verbose=0, return_dict=True)

    (logs, _), _ = check(lambda: made(OfSeveral), use)
    assert {name for each in logs for name in each} == {"loss", "twice", "sums"}


class OfTheGuide(Own):
    """Returns its metrics as Keras' guides do, those of ``compile`` in a dict of their own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        super().train_step(data)
        return self._updated(x, y)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self._updated(x, y)

    def _updated(self, x: Any, y: Any) -> dict[str, Any]:
        predicted = self(x, training=False)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(keras.ops.mean(keras.ops.square(y - predicted)))
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def case_metrics_that_a_step_returns_as_the_guides_do() -> None:
    def use(model: keras.Model) -> Any:
        history = fit(model, rows=24, validation_data=(X[:BATCH], Y[:BATCH]), validation_batch_size=BATCH)
        return history, model.evaluate(X[:24], Y[:24], BATCH, verbose=0, return_dict=True)

    (_, results), _ = check(lambda: made(OfTheGuide, loss="mse", metrics=["mae"]), use)
    assert set(results) == {"loss", "mae"}


class Annealed(keras.layers.Layer):
    """Counts the steps, of which the last of an epoch has rows of one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.add_weight(initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1.0)
        return x * (1.0 + 0.1 * self.steps)


def case_a_counter_of_steps() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), Annealed(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=JIT)
        return model

    _, weights = check(make, lambda model: fit(model, rows=25, epochs=3))
    assert 9.0 in [float(each) for each in weights if each.ndim == 0]


class FromOne(keras.metrics.Metric):
    """Begins with a row that it was given (Laplace smoothing)."""

    def __init__(self, name: str = "from_one") -> None:
        super().__init__(name=name)
        self.hits = self.add_weight(initializer="ones", name="hits")
        self.rows = self.add_weight(initializer=keras.initializers.Constant(2.0), name="rows")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.hits.assign_add(keras.ops.sum(keras.ops.cast(predicted > y, "float32")))
        self.rows.assign_add(keras.ops.cast(keras.ops.size(y), "float32"))

    def reset_state(self) -> None:
        self.hits.assign(1.0)
        self.rows.assign(2.0)

    def result(self) -> Any:
        return self.hits / self.rows


def case_a_metric_that_does_not_begin_with_zeros() -> None:
    def use(model: keras.Model) -> Any:
        return fit(model, rows=25, validation_split=0.3), model.evaluate(X, Y, 7, verbose=0)

    check(lambda: made(loss="mse", metrics=[FromOne()]), use)


class InPython(keras.metrics.Metric):
    """Keeps rows in a list."""

    def __init__(self) -> None:
        super().__init__(name="in_python")
        self.numbers: list[int] = []

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.numbers.append(len(y))

    def reset_state(self) -> None:
        del self.numbers[:]

    def result(self) -> Any:
        return float(sum(self.numbers))


def case_a_metric_without_variables_is_said() -> None:
    with distribute.MirroredStrategy().scope():
        model = made(loss="mse", metrics=[InPython()], run_eagerly=True)
    with pytest.warns(UserWarning, match="'in_python' has no variables"):
        history = fit(model, rows=24, epochs=1)
    assert history["in_python"] == [12.0]  # none that were invented


def case_a_callback_that_ends_training_on_one_rank() -> None:
    x = X.copy()
    x[-1] = np.nan  # of one rank

    def use(model: keras.Model) -> Any:
        callbacks = [keras.callbacks.TerminateOnNaN()]
        history = model.fit(x, Y, batch_size=25, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        return [len(history["loss"])]

    def make() -> keras.Model:
        return made(loss="mse")

    expected = of_one_rank(lambda: use(make()))
    with distribute.MirroredStrategy().scope():
        model = make()
    assert use(model) == expected == [1]


class Error(keras.Model):
    """Predicts the distance from the labels."""

    def predict_step(self, data: Any) -> Any:
        if BACKEND == "torch":
            data = keras.tree.map_structure(lambda each: each.to(self.trainable_weights[0].value.device), data)
        x, y = data
        return self(x, training=False) - keras.ops.cast(y, "float32")


def case_a_predict_step_that_needs_labels() -> None:
    x = X.astype("float32")
    batches = [(x[first : first + BATCH], Y[first : first + BATCH]) for first in range(0, len(x), BATCH)]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Keras: the data set has no super().__init__(**kwargs)
        check(lambda: made(Error, loss="mse"), lambda model: model.predict(Batches(), verbose=0))


def case_predictions_of_padded_batches_and_text() -> None:
    import tensorflow as tf

    lengths = tf.data.Dataset.from_tensor_slices([3] * 16 + [5] * 8 + [2])
    padded = lengths.map(lambda length: (tf.ones(length, tf.int32), length)).padded_batch(8)

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((None,), dtype="int32"), keras.layers.Embedding(3, 2), keras.layers.GRU(2)]
        )

    check(make, lambda model: model.predict(padded, verbose=0))

    def of_text() -> keras.Model:
        number = keras.Input((), dtype="int64")
        return keras.Model(number, keras.layers.StringLookup(vocabulary=["a", "bc"], invert=True)(number))

    with distribute.MirroredStrategy().scope():
        model = of_text()
    found = model.predict(np.arange(3), batch_size=2, verbose=0)
    assert [bytes(each) for each in found] == [b"[UNK]", b"a", b"bc"]


def case_predictions_of_sparse_rows_say_nothing() -> None:
    import tensorflow as tf

    rows = np.where(X[:20] > 0.5, X[:20], 0.0).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(rows)).batch(8)
    dense = tf.data.Dataset.from_tensor_slices(rows).batch(8)

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        sparse = keras.Input((X.shape[1],), sparse=True)
        return keras.Model(sparse, keras.layers.Dense(1)(sparse))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(make, lambda model: model.predict(batches, verbose=0))
        with distribute.MirroredStrategy().scope():
            model = made(loss="mse")
        model.predict(dense, verbose=0)
    assert not [each for each in said if "ran out of data" in str(each.message)]


def case_the_result_of_a_metric_in_a_compiled_function() -> None:
    import tensorflow as tf

    with distribute.MirroredStrategy().scope():
        metric = keras.metrics.MeanAbsoluteError()
    metric.update_state([1.0], [2.0])
    with pytest.raises(StrategyError, match="'mean_absolute_error' was read in a compiled function"):
        tf.function(metric.result)()


class WithQueue(Own):
    """Keeps the last rows that it has seen, and a mean of them."""

    def __init__(self, *given: Any, aggregation: str = "none") -> None:
        super().__init__(*given)
        self.last = keras.Variable(np.ones((4, 3), "float32"), trainable=False, aggregation=aggregation, name="last")
        self.mean = keras.Variable(np.ones(3, "float32"), trainable=False, name="mean")

    def train_step(self, data: Any) -> dict[str, Any]:
        rows = keras.ops.cast(data[0], "float32")[:4]
        self.last.assign(rows)
        self.mean.assign(keras.ops.mean(rows, axis=0))
        return super().train_step(data)


def case_a_queue_of_rows_is_warned_of(caplog) -> None:
    for aggregation in ("none", "only_first_replica"):
        with distribute.MirroredStrategy().scope():
            model = made(partial(WithQueue, aggregation=aggregation))
        fit(model)
        last = keras.ops.convert_to_numpy(model.last)
        expected = X[12:16] if aggregation != "none" else (X[12:16] + X[18:22]) / 2
        np.testing.assert_allclose(last, expected, rtol=1e-5)
    said = [each.message for each in caplog.records if "queue of rows" in each.message]
    assert len(said) == (choros.rank() == 0)
    assert all("'last'" in each for each in said)


def case_a_queue_of_rows_in_a_loop_is_warned_of(caplog) -> None:
    here = distribute.MirroredStrategy()
    with here.scope():
        rows = keras.Layer().add_weight(shape=(2, 3), name="rows_of_loop", trainable=False)
    here.run(lambda: rows.assign(np.full((2, 3), choros.rank() + 1.0)))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(rows), np.full((2, 3), 1.5))
    assert [each.message.split("'")[1] for each in caplog.records] == [rows.path] * (choros.rank() == 0)


class OfTorch(Own):
    """Updates with an optimizer of PyTorch, which knows nothing of other replicas."""

    def train_step(self, data: Any) -> dict[str, Any]:
        import torch

        x, y = data
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = self._loss(x, y, True)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}


def case_an_optimizer_of_pytorch_in_a_train_step() -> None:
    with distribute.MirroredStrategy().scope():
        model = made(OfTorch)
    with pytest.raises(StrategyError, match="In the train_step of a Keras model, use an optimizer of Keras"):
        fit(model)


def case_arrays_of_text_and_without_rows() -> None:
    import tensorflow as tf

    texts = np.array(["a b", "b", "c a", "a"] * 4, dtype=object)

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        vectorize = keras.layers.TextVectorization(output_mode="multi_hot", vocabulary=["a", "b", "c"])
        text = keras.Input((), dtype="string")
        model = keras.Model(text, keras.layers.Dense(1)(vectorize(text)))
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        return model

    for given in (texts, tf.constant(texts)):
        check(make, lambda model, given=given: fit_on(model, given))
    with distribute.MirroredStrategy().scope():
        model = made(loss="mse")
    with pytest.raises(ConfigError, match="rows of a SparseTensor"):
        fit_on(model, tf.sparse.from_dense(X[:16].astype("float32")))


def fit_on(model: keras.Model, x: Any) -> dict[str, list[float]]:
    history: dict[str, list[float]] = model.fit(x, Y[:16], batch_size=6, shuffle=False, verbose=0).history
    return history
