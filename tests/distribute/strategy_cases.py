"""A model that a strategy trains on global batches equals one that plain Keras trains on one device.

Run by ``test_strategies.py`` on two ranks of each framework. Every rank trains the strategy's model, and a plain one on
the whole data as the reference: same initial weights, same batches, no strategy.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import choros
from choros import distribute, nn
from choros.errors import ConfigError, StrategyError
from choros.parallel.objects import allgather_object, broadcast_object
from choros.training.replaced import replaced
from ranks.reference import of_one_rank

BACKEND = keras.backend.backend()
FEATURES, CLASSES, BATCH = 6, 3, 16
#: Five batches per epoch, the last with one example, so that one of two replicas has none; four epochs are 20 steps.
N = 65
#: On TensorFlow, XLA compiles each of these small models for seconds; one case uses Keras' own choice.
JIT = False if BACKEND == "tensorflow" else "auto"
LOSS = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


@functools.cache
def strategy(name: str = "mirrored") -> distribute.Strategy:
    kinds = {
        "mirrored": distribute.MirroredStrategy,
        "multi_worker": distribute.MultiWorkerMirroredStrategy,
        "central": distribute.experimental.CentralStorageStrategy,
    }
    return kinds[name]()


def data(n: int = N, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, FEATURES)).astype("float32"), generator.integers(0, CLASSES, n).astype("int32")


def held_out() -> tuple[np.ndarray, np.ndarray]:
    return data(21, seed=1)


def build(optimizer=None, **compile_args) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
    )
    compile_args = {"loss": LOSS(), "metrics": ["accuracy"], "jit_compile": JIT, **compile_args}
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **compile_args)
    return model


def both(make=build, name: str = "mirrored") -> tuple[keras.Model, keras.Model]:
    """Returns a model of the strategy, and a plain one."""
    with strategy(name).scope():
        ours = make()
    return ours, make()


def fit(model: keras.Model, *args, epochs: int = 4, **kwargs) -> dict[str, list[float]]:
    return model.fit(*args, **{"epochs": epochs, "shuffle": False, "verbose": 0, **kwargs}).history


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(weight.value)) for weight in model.weights]


def assert_same_weights(ours: keras.Model, theirs: keras.Model | list[np.ndarray], rtol: float = 1e-4) -> None:
    values = theirs if isinstance(theirs, list) else weights(theirs)
    for mine, expected in zip(weights(ours), values, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=rtol, atol=rtol / 10)
        np.testing.assert_array_equal(mine, broadcast_object(mine), err_msg="processes have different weights")


def assert_same_history(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


@functools.cache
def plain_run() -> tuple[list[list[np.ndarray]], dict[str, list[float]]]:
    """Plain Keras trains the model of ``build``: its weights after each epoch, and its history."""

    def trained():
        model, after = build(), []
        note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: after.append(weights(model)))
        return after, fit(model, *data(), batch_size=BATCH, validation_data=held_out(), callbacks=[note])

    return of_one_rank(trained)


def check_equals_plain_run(model: keras.Model, history: dict[str, list[float]], last: int = 4) -> None:
    """Checks a model of ``build`` after epoch ``last``, and its history, which may begin later than the first epoch."""
    after, expected = plain_run()
    first = last - len(history["loss"])
    assert_same_history(history, {name: expected[name][first:last] for name in history})
    assert_same_weights(model, after[last - 1])


def check_transparent(make=build, name: str = "mirrored", **fit_args) -> tuple[keras.Model, keras.Model]:
    ours, theirs = both(make, name)
    histories = [fit(model, *data(), batch_size=BATCH, **fit_args) for model in (ours, theirs)]
    assert_same_weights(ours, theirs)
    assert_same_history(*histories)
    return ours, theirs


def directory() -> Path:
    """Returns an empty directory, the same for all processes."""
    import tempfile

    return Path(broadcast_object(tempfile.mkdtemp() if choros.rank() == 0 else None))


# ── fit equals one device: the defects of tf.distribute under Keras 3 ────────────────────────────────


def case_mirrored_equals_one_device():
    with strategy().scope():
        model = build(jit_compile="auto")
    check_equals_plain_run(model, fit(model, *data(), batch_size=BATCH, validation_data=held_out()))
    assert type(model.optimizer).__name__ == "Adam"


def case_multi_worker_mirrored_equals_one_device():
    check_transparent(name="multi_worker", validation_split=0.2)


def case_central_storage_equals_one_device():
    with strategy("central").scope():
        model = build()
    check_equals_plain_run(model, fit(model, *data(), batch_size=BATCH))
    # Only one process has the moments, two for each weight; the others do not allocate them.
    assert allgather_object(len(model.optimizer.variables)) == [2 + 2 * len(model.trainable_weights), 2]


def case_central_storage_with_clipping_and_momentum():
    check_transparent(lambda: build(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)), "central")


def case_central_storage_with_a_loss_scale_or_averages():
    """All processes need the scale, or the moving averages of weights, and so keep the optimizer's state."""

    def make(*, scaled: bool):
        adam = keras.optimizers.Adam(0.01, use_ema=not scaled, ema_momentum=0.9)
        return build(keras.optimizers.LossScaleOptimizer(adam, initial_scale=16.0) if scaled else adam)

    for scaled in (True, False):
        check_transparent(functools.partial(make, scaled=scaled), "central")


def case_accumulation_with_central_storage_goes_on_from_a_saved_model():
    """After three micro-batches of updates of two; the other ranks skip the optimizer's file."""

    def make():
        return build(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))

    with strategy("central").scope():
        ours = make()
    theirs = make()
    path = directory() / "model.keras"
    for model in (ours, theirs):
        fit(model, *data(3 * BATCH), batch_size=BATCH, epochs=1)
    ours.save(path)
    with strategy("central").scope(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        again = keras.models.load_model(path)
    for model in (again, theirs):
        fit(model, *data(3 * BATCH, seed=2), batch_size=BATCH, epochs=1)
    assert_same_weights(again, theirs)


def case_gradient_accumulation_with_central_storage():
    check_transparent(lambda: build(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), "central")


def case_infinity_on_one_replica_only():
    """The second half of a batch overflows: all replicas skip that step, and halve the scale."""

    def make():
        return build(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1024.0))

    x, y = data(48)
    x[BATCH + BATCH // 2 : 2 * BATCH] = np.inf
    ours, theirs = both(make)
    for model in (ours, theirs):
        with np.errstate(all="ignore"):
            fit(model, x, y, batch_size=BATCH, epochs=1)
    assert all(np.isfinite(weight).all() for weight in weights(ours))
    assert_same_weights(ours, theirs)
    scales = [float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) for model in (ours, theirs)]
    assert scales == [512.0, 512.0]


def case_mixed_precision_scales_the_loss_by_itself():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        ours, theirs = both()
        for model in (ours, theirs):
            fit(model, *data(), batch_size=BATCH, epochs=1)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(ours.optimizer).__name__ == "LossScaleOptimizer"
    assert_same_weights(ours, theirs, rtol=2e-2)


def case_several_steps_per_execution():
    if BACKEND == "torch":
        return  # not supported by Keras 3.15 on torch
    with strategy().scope():
        model = build(steps_per_execution=2)
    check_equals_plain_run(model, fit(model, *data(), batch_size=BATCH))


def case_example_weights():
    check_transparent(sample_weight=np.linspace(0.1, 2.0, N).astype("float32"))


def case_class_weights():
    check_transparent(class_weight={0: 1.0, 1: 3.0, 2: 0.5})


def case_regularisation_counts_once():
    def make():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(0.05))
        model = keras.Sequential([keras.Input((FEATURES,)), dense])
        model.compile(keras.optimizers.SGD(0.1), LOSS())
        return model

    check_transparent(make)


def of_two_outputs() -> keras.Model:
    keras.utils.set_random_seed(1)
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((FEATURES,), name="right")
    hidden = keras.layers.Dense(8)(keras.layers.add([left, right]))
    outputs = {"a": keras.layers.Dense(CLASSES, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(keras.optimizers.SGD(0.05), {"a": LOSS(), "b": "mse"}, metrics={"a": ["accuracy"], "b": ["mae"]})
    return model


def case_several_inputs_and_outputs():
    (x, y), (other, _) = data(64), data(64, seed=2)  # on TensorFlow, Keras weights batches equally in an output's loss
    inputs, targets = {"left": x, "right": other}, {"a": y, "b": x[:, :1]}
    ours, theirs = both(of_two_outputs)
    histories = [fit(model, inputs, targets, batch_size=BATCH) for model in (ours, theirs)]
    assert_same_weights(ours, theirs)
    assert_same_history(*histories)
    mine, expected = ours.predict(inputs, verbose=0), theirs.predict(inputs, verbose=0)
    for name in expected:
        np.testing.assert_allclose(mine[name], expected[name], rtol=1e-4, atol=1e-5)
    results = [model.evaluate(inputs, targets, verbose=0, return_dict=True) for model in (ours, theirs)]
    assert_same_history(*({name: [value] for name, value in result.items()} for result in results))


def case_statistics_of_layers_are_averaged():
    """Each replica normalises its own rows; the statistics for evaluation are the mean, identical on all ranks."""

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.own = weights(self.model)

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.BatchNormalization(), keras.layers.Dense(CLASSES)]
        )
        model.compile(keras.optimizers.SGD(0.0), LOSS())
        return model

    with strategy().scope():
        model = make()
    watch = Watch()
    fit(model, *data(64), batch_size=BATCH, epochs=1, callbacks=[watch])
    for own, averaged in zip(watch.own, weights(model), strict=True):
        np.testing.assert_allclose(averaged, np.mean(allgather_object(own), axis=0), rtol=1e-5, atol=1e-7)
    assert not np.allclose(*(statistics[2] for statistics in allgather_object(watch.own)))


def case_a_model_that_is_built_by_the_first_batch():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)])
        model.compile("adam", LOSS(), metrics=["accuracy"], jit_compile=JIT)
        return model

    check_transparent(make)


def case_shuffled_epochs_see_every_example_once():
    class Sum(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="sum")
            self.total = self.add_weight(name="total", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

        def result(self):
            return keras.ops.convert_to_tensor(self.total)

    with strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Sum()])
    x = np.zeros((N, 1), "float32")
    history = fit(model, x, 2.0 ** np.arange(N) % 1009, batch_size=BATCH, shuffle=True, epochs=3)
    np.testing.assert_allclose(history["sum"], [(2.0 ** np.arange(N) % 1009).sum()] * 3, rtol=1e-6)


def case_processes_have_other_rows():
    with strategy().scope():
        model = build()
    x, y = data()
    order = np.random.default_rng(choros.rank()).permutation(N)
    one_hot = np.eye(CLASSES, dtype="float32")[y[order]]
    other = {
        "different data: rank 1 has not the same rows as rank 0": lambda: model.fit(x[order], y[order], verbose=0),
        "keras.utils.set_random_seed": lambda: model.fit(x, y, validation_data=(x[order], y[order]), verbose=0),
        "random_state=": lambda: model.evaluate(np.zeros((N, FEATURES)), one_hot, verbose=0),
        "choros.keras": lambda: model.predict(x[: N - choros.rank()], verbose=0),
    }
    for text, call in other.items():
        with pytest.raises(ConfigError, match=text):
            call()
    x = x + np.float32(1e-7 * choros.rank())  # of another processor
    model.fit(x, y, batch_size=BATCH, verbose=0)


def case_all_processes_draw_the_same_numbers():
    random.seed(choros.rank())
    np.random.seed(choros.rank())
    made = distribute.MirroredStrategy()
    with made.scope():
        model = build()
    drawn = [random.random(), np.random.permutation(N).tolist()]
    model.fit(*data(), batch_size=BATCH, verbose=0)
    drawn += [random.random(), np.random.permutation(N).tolist()]
    assert allgather_object(drawn) == [drawn] * choros.size()


# ── every kind of data ───────────────────────────────────────────────────────────────────────────────


class Batches(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.x, self.y = data()

    def __len__(self):
        return -(-N // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)


def data_loader(**how):
    import torch

    x, y = data()
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=BATCH, **how
    )


def generator():
    while True:
        for index in range(N // BATCH):
            yield Batches()[index]


def check_data(make_data) -> None:
    with strategy().scope():
        model = build()
    check_equals_plain_run(model, fit(model, make_data(), epochs=2), last=2)
    x, y = data()
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(model.predict(make_data(), verbose=0), predicted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(make_data(), verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-4, atol=1e-5
    )


def case_batches_of_a_py_dataset():
    check_data(Batches)


def case_batches_of_tf_data():
    check_data(tf_data)


def case_batches_of_a_data_loader():
    check_data(data_loader)


def case_batches_of_a_data_loader_that_shuffles_by_a_generator():
    """From which iterators draw, too: Keras begins fewer where a replica has no row of the last batch. Its seed is that
    of the first rank.
    """
    import torch

    ours, theirs = both()
    for model, seed in ((ours, 1 + choros.rank()), (theirs, 1)):
        loader = data_loader(shuffle=True, generator=torch.Generator().manual_seed(seed))
        fit(model, loader, epochs=2, validation_data=loader)
        fit(model, loader, epochs=2)
    assert_same_weights(ours, theirs)


def case_data_sets_with_fewer_rows_than_replicas():
    row = data(1)

    class Row(Batches):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return row

    kinds = [Row()]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        kinds.append(tf.data.Dataset.from_tensor_slices(row).batch(2))
    elif BACKEND == "torch":
        import torch

        tensors = torch.utils.data.TensorDataset(*map(torch.tensor, row))
        kinds.append(torch.utils.data.DataLoader(tensors, batch_size=2))
    for given in kinds:
        ours, theirs = both()  # whose metrics are not built before
        np.testing.assert_allclose(ours.evaluate(given, verbose=0), theirs.evaluate(*row, verbose=0), rtol=1e-4)
        with pytest.raises(ConfigError, match="a global batch of 1 examples is smaller than the 2 replicas"):
            ours.fit(given, verbose=0)
        histories = [fit(model, *data(), batch_size=BATCH, validation_data=given) for model in (ours, theirs)]
        assert_same_history(*histories)


def case_epochs_of_some_steps_go_on_where_the_one_before_has_ended():
    own = {"torch": data_loader, "tensorflow": tf_data, "jax": Batches}[BACKEND]
    for given in (data(), (Batches(),), (own(),)):
        ours, theirs = both()
        batch_size = BATCH if len(given) == 2 else None
        with pytest.warns(UserWarning, match="ran out of data"):  # in epoch 3, which has one step
            histories = [fit(model, *given, batch_size=batch_size, steps_per_epoch=2) for model in (ours, theirs)]
        assert_same_weights(ours, theirs)
        assert_same_history(*histories)


def case_batches_of_a_py_dataset_are_shuffled():
    class Recorded(Batches):
        def __init__(self):
            super().__init__()
            self.read, self.epochs = [], []

        def __getitem__(self, index):
            self.read.append(index)
            return super().__getitem__(index)

        def on_epoch_end(self):
            self.epochs.append(self.read)
            self.read = []

    with strategy().scope():
        model = build()
    batches = Recorded()
    fit(model, batches, epochs=3, shuffle=True)
    orders = [read[:4] for read in batches.epochs[-3:]]  # in the fifth, a replica has no rows
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3]] * 3
    assert orders[1:] != orders[:-1]
    assert allgather_object(orders) == [orders] * choros.size()


def case_batches_of_a_generator():
    ours, theirs = both()
    histories = [fit(model, generator(), steps_per_epoch=N // BATCH, epochs=2) for model in (ours, theirs)]
    assert_same_weights(ours, theirs)
    assert_same_history(*histories)
    batches = generator(), generator()
    for _ in range(2):  # the second goes on where the first has ended
        histories = [fit(model, own, steps_per_epoch=1) for model, own in zip((ours, theirs), batches, strict=True)]
        assert_same_history(*histories)
    assert_same_weights(ours, theirs)


def case_later_calls_of_fit_go_on_with_the_orders_of_a_shuffled_data_set():
    import tensorflow as tf

    ours, theirs = both()
    for repeated in (False, True):
        batches = [tf.data.Dataset.from_tensor_slices(data()).shuffle(N, seed=3).batch(BATCH) for _ in range(2)]
        batches = [each.repeat() for each in batches] if repeated else batches
        next(iter(batches[1]))  # under a strategy, the first order is the second of plain Keras
        for _ in range(3):
            pairs = zip((ours, theirs), batches, strict=True)
            histories = [fit(model, own, steps_per_epoch=1) for model, own in pairs]
            assert_same_history(*histories)
    assert_same_weights(ours, theirs)


def case_tensors_and_held_out_data_smaller_than_the_replicas():
    x, y = data()
    model, plain = both()
    tensors = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    history = fit(model, *tensors, batch_size=BATCH, epochs=2, validation_data=(x[:1], y[:1]))
    values = {name: history.pop(name) for name in ("val_loss", "val_accuracy")}
    check_equals_plain_run(model, history, last=2)
    plain.set_weights(weights(model))
    expected = plain.evaluate(x[:1], y[:1], verbose=0)
    np.testing.assert_allclose([each[-1] for each in values.values()], expected, rtol=1e-4)


# ── evaluate, predict, single batches ────────────────────────────────────────────────────────────────


def case_evaluate_and_predict_equal_one_device():
    ours, theirs = both()
    for n in (N, 2, 1):  # with one example, one replica has none
        x, y = data(n)
        results = [model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True) for model in (ours, theirs)]
        assert_same_history(*({name: [value] for name, value in result.items()} for result in results))
        predicted = ours.predict(x, batch_size=7, verbose=0)
        np.testing.assert_allclose(predicted, theirs.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.evaluate(*data(), verbose=0), theirs.evaluate(*data(), verbose=0), rtol=1e-5)


def case_predictions_of_a_distributed_data_set_are_those_of_all_rows():
    ours, theirs = both()
    for n in (N, 1):  # with one row, one replica has none
        x, _ = data(n)
        batches = [x[i : i + BATCH] for i in range(0, n, BATCH)]
        if BACKEND == "tensorflow":
            import tensorflow as tf

            batches = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)
        predicted = ours.predict(strategy().experimental_distribute_dataset(batches), verbose=0)
        np.testing.assert_allclose(predicted, theirs.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def case_predictions_of_batches_of_one_row():
    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return (data(3)[0][index : index + 1],)

    ours, theirs = both()
    predicted = ours.predict(Rows(), verbose=0)
    np.testing.assert_allclose(predicted, theirs.predict(data(3)[0], verbose=0), rtol=1e-5, atol=1e-6)


def case_predictions_of_other_numbers_of_rows_are_an_error():
    with strategy().scope():
        model = keras.Sequential([keras.Input((4, 3)), keras.layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 3)))])
    with pytest.raises(ConfigError, match="24 rows of an output for 6 rows of the input"):
        model.predict(np.zeros((6, 4, 3), "float32"), batch_size=4, verbose=0)


def case_single_batches_equal_one_device():
    ours, theirs = both()
    for seed, rows in enumerate((9, 8, 1, 9)):  # of one row, a replica has none
        x, y = data(rows, seed)
        np.testing.assert_allclose(ours.train_on_batch(x, y), theirs.train_on_batch(x, y), rtol=1e-4)
    for rows in (9, 1):
        x, y = data(rows, 4)
        np.testing.assert_allclose(ours.test_on_batch(x, y), theirs.test_on_batch(x, y), rtol=1e-4)
        np.testing.assert_allclose(ours.predict_on_batch(x), theirs.predict_on_batch(x), rtol=1e-4, atol=1e-5)
    assert_same_weights(ours, theirs)


def case_fit_that_another_library_has_replaced():
    """It passes on all that it receives, and has not the names of the arguments."""
    own = keras.Model.fit
    with replaced(keras.Model, fit=lambda *args, **kwargs: own(*args, **kwargs)), strategy().scope():
        model = build()
        history = fit(model, *data(), batch_size=BATCH, validation_data=held_out())
    check_equals_plain_run(model, history)


def case_single_batches_of_several_outputs():
    """From 9 rows to 10 the part of one replica keeps its size, for which TensorFlow has compiled a step."""
    ours, theirs = both(of_two_outputs)
    for step, rows in enumerate((9, 10, 1, 1, 10, 9)):
        (x, y), (other, _) = data(rows, step), data(rows, seed=2)
        batch = {"left": x, "right": other}, {"a": y, "b": x[:, :1]}
        results = [model.train_on_batch(*batch, return_dict=True)["loss"] for model in (ours, theirs)]
        if step == 0:  # then TensorFlow no longer weights the batch of an output's loss by its rows
            np.testing.assert_allclose(*results, rtol=1e-4)
        ours.test_on_batch(*batch)
    assert_same_weights(ours, theirs)


# ── callbacks and files ──────────────────────────────────────────────────────────────────────────────


def case_files_are_written_once_and_training_resumes():
    path = directory()

    def run(epochs):
        with strategy().scope():
            model = build()
        callbacks = [
            keras.callbacks.BackupAndRestore(path / "backup", delete_checkpoint=False),
            keras.callbacks.ModelCheckpoint(path / "last.keras", verbose=1),
            keras.callbacks.CSVLogger(path / "log.csv", append=True),
        ]
        history = fit(model, *data(), batch_size=BATCH, epochs=epochs, callbacks=callbacks)
        return model, history

    run(2)
    model, history = run(4)
    check_equals_plain_run(model, history)
    assert (path / "log.csv").read_text().count("\n") == 5  # a head and four epochs
    loaded = keras.models.load_model(path / "last.keras")
    np.testing.assert_allclose(loaded.evaluate(*data(), verbose=0), model.evaluate(*data(), verbose=0), rtol=1e-4)


def case_callbacks_receive_global_metrics():
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    with strategy().scope():
        model = build()
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=0, min_delta=10.0)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch))
    fit(model, *data(), batch_size=BATCH, validation_data=data(9, 3), callbacks=[Watch(), stop, schedule])
    assert allgather_object(seen) == [seen, seen]
    assert len(seen) == 2


def case_saved_models_load_inside_and_outside_of_a_scope():
    path = directory()
    ours, theirs = both()
    fit(ours, *data(), batch_size=BATCH, epochs=1)
    fit(theirs, *data(), batch_size=BATCH, epochs=1)
    ours.save(path / "model.keras")
    ours.save_weights(path / "model.weights.h5")
    outside = keras.models.load_model(path / "model.keras")
    with strategy().scope():
        inside = keras.models.load_model(path / "model.keras")
        other = build()
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path / "model.weights.h5")
    for loaded in (outside, inside, theirs):
        fit(loaded, *data(), batch_size=BATCH, epochs=1)
    assert_same_weights(outside, theirs)
    assert_same_weights(inside, theirs)
    np.testing.assert_allclose(other.predict(data()[0], verbose=0), ours.predict(data()[0], verbose=0), rtol=1e-5)


def case_an_exported_model_serves_outside():
    path = directory()
    with strategy().scope():
        model = build()
    model.export(str(path / "saved"), verbose=False)
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path / "saved"))
    np.testing.assert_allclose(loaded.serve(data()[0]), model.predict(data()[0], verbose=0), rtol=1e-4, atol=1e-5)


def case_checkpoints_of_tensorflow_restore_with_and_without_a_strategy():
    import tensorflow as tf

    path, x = directory(), data()[0]

    def made():
        model = build()
        model.optimizer.build(model.trainable_variables)
        return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    with strategy().scope():
        ours, checkpoint = made()
        manager = tf.train.CheckpointManager(checkpoint, str(path / "managed"), max_to_keep=2)
    fit(ours, *data(), batch_size=BATCH, epochs=1)
    saved = checkpoint.save(str(path / "ours"))
    assert saved == tf.train.latest_checkpoint(path)
    assert int(checkpoint.save_counter) == 1
    managed = [manager.save() for _ in range(3)]
    assert manager.latest_checkpoint == managed[-1] == tf.train.latest_checkpoint(path / "managed")
    outside, plain = made()
    plain.restore(saved).assert_consumed()
    np.testing.assert_allclose(outside.predict(x, verbose=0), ours.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    fit(outside, *data(), batch_size=BATCH, epochs=1)
    plain.write(str(path / f"theirs-{choros.rank()}"))  # without a strategy, each process writes for itself
    with strategy().scope():
        inside, restoring = made()
        restoring.restore(str(path / f"theirs-{choros.rank()}")).assert_consumed()
    fit(ours, *data(), batch_size=BATCH, epochs=1)
    assert_same_weights(inside, ours)


# ── custom loops ─────────────────────────────────────────────────────────────────────────────────────


def train_step_of(model, optimizer):
    """Returns the framework's training step: the loss is divided by the global batch, gradients are summed."""
    loss_of = LOSS(reduction="none")

    def loss_on(x, y):
        return nn.compute_average_loss(loss_of(y, model(x, training=True)), global_batch_size=BATCH)

    def tensorflow_step(batch):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_on(*batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def torch_step(batch):
        model.zero_grad()
        loss = loss_on(*batch)
        loss.backward()
        import torch

        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)
        return loss.detach()

    return {"tensorflow": tensorflow_step, "torch": torch_step}[BACKEND]


def custom_loop(scope, run, batches, reduce) -> tuple[keras.Model, list[float]]:
    with scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(CLASSES)]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    if BACKEND == "jax":
        return jax_loop(model, optimizer, run, batches, reduce)
    step = train_step_of(model, optimizer)

    def distributed_step(batch):
        return reduce(run(step, args=(batch,)))

    if BACKEND == "tensorflow":
        import tensorflow as tf

        distributed_step = tf.function(distributed_step, reduce_retracing=True)
    return model, [float(distributed_step(batch)) for _ in range(4) for batch in batches]


def jax_loop(model, optimizer, run, batches, reduce):
    import jax

    loss_of = LOSS(reduction="none")

    def loss_on(trainable, rest, x, y):
        outputs, rest = model.stateless_call(trainable, rest, x, training=True)
        return nn.compute_average_loss(loss_of(y, outputs), global_batch_size=BATCH), rest

    @jax.jit
    def step(state, batch):
        trainable, rest, moments = state
        (loss, rest), gradients = jax.value_and_grad(loss_on, has_aux=True)(trainable, rest, *batch)
        trainable, moments = optimizer.stateless_apply(moments, gradients, trainable)
        return (trainable, rest, moments), loss

    state = tuple(
        [v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    losses = []
    for _ in range(4):
        for batch in batches:
            state, loss = run(step, args=(state, batch))
            losses.append(float(reduce(loss)))
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    return model, losses


def batches_of_arrays():
    return [tuple(each[i : i + BATCH] for each in data()) for i in range(0, N, BATCH)]


@functools.cache
def plain_loop():
    return custom_loop(contextlib.nullcontext, lambda step, args: step(*args), batches_of_arrays(), lambda loss: loss)


def check_custom_loop(name):
    here = strategy(name)
    data_set = tf_data() if BACKEND == "tensorflow" else batches_of_arrays()
    distributed = here.experimental_distribute_dataset(data_set)
    ours, losses = custom_loop(here.scope, here.run, distributed, lambda loss: here.reduce("SUM", loss, axis=None))
    theirs, expected = plain_loop()
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert_same_weights(ours, theirs)


def case_a_custom_loop_sums_over_replicas():
    check_custom_loop("mirrored")


def case_a_custom_loop_with_central_storage():
    check_custom_loop("central")


def case_losses_of_keras_in_a_custom_loop_are_of_all_replicas():
    here = strategy()
    with here.scope():
        model = build(loss=LOSS())
        model.layers[-1].kernel.regularizer = keras.regularizers.L2(0.1)
    x, y = (each[:8] for each in data())
    mine = slice(0, 4) if choros.rank() == 0 else slice(4, 8)

    def step():
        outputs = model(x[mine])
        sums = LOSS(reduction="sum")(y[mine], outputs)
        return LOSS()(y[mine], outputs), sums, model.compute_loss(x[mine], y[mine], outputs)

    reduced = [keras.ops.convert_to_numpy(here.reduce("SUM", loss, axis=None)) for loss in here.run(step)]
    outputs = model(x)
    expected = float(keras.ops.convert_to_numpy(LOSS()(y, outputs)))
    regularization = 0.1 * np.square(weights(model)[-2]).sum()
    np.testing.assert_allclose(reduced, [expected, 8 * expected, expected + regularization], rtol=1e-5)


def case_metrics_of_a_custom_loop_count_all_replicas():
    here = strategy()
    with here.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    labels = np.arange(6) % 2
    outputs = np.eye(2, dtype="float32")[[0, 1, 0, 0, 0, 0]]
    mine = slice(0, 3) if choros.rank() == 0 else slice(3, 6)
    here.run(lambda: accuracy.update_state(labels[mine], outputs[mine]))
    assert float(accuracy.result()) == pytest.approx(4 / 6)
    accuracy.reset_state()
    assert float(accuracy.result()) == 0.0


@pytest.mark.parametrize("compiled", [False, True] if BACKEND == "tensorflow" else [False])
def case_metrics_made_outside_of_the_scope_count_all_replicas(compiled):
    here, mean = strategy(), keras.metrics.Mean()
    total = keras.Variable(0.0, trainable=False, synchronization="on_read", aggregation="sum")
    values = np.array([[1.0, 3.0], [5.0, 7.0]], "float32")[choros.rank()]

    def step():
        mean.update_state(values)
        total.assign_add(values[0])

    def steps():
        here.run(step)

    if compiled:
        import tensorflow as tf

        steps = tf.function(steps)
    for _ in range(2):
        steps()
        steps()
        assert float(mean.result()) == 4.0
        mean.reset_state()
    assert float(keras.ops.convert_to_numpy(total)) == 24.0
    with pytest.raises(ConfigError, match="assign_add of the variable"):
        total.assign_add(1.0)


def case_a_users_metric_made_outside_of_the_scope_is_refused():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.largest = self.add_weight(name="largest", initializer="zeros")

        def update_state(self, values):
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(values)))

        def result(self):
            return self.largest

    largest = Largest()
    for _ in range(2):
        with pytest.raises(StrategyError, match="'largest', a Largest, was created outside of the scope of this Mirr"):
            strategy().run(lambda: largest.update_state(np.ones(2, "float32")))


def case_collectives_in_replicas():
    here = strategy()

    def step(mine):
        replica = distribute.get_replica_context()
        number = replica.replica_id_in_sync_group
        total = replica.all_reduce("SUM", {"a": keras.ops.ones(2) * (number + 1.0)})
        parts = replica.all_gather(keras.ops.ones((number + 1, 2)) * mine, axis=0)
        merged = replica.merge_call(lambda strategy, x: strategy.reduce("MEAN", x, axis=None), args=(mine,))
        return total["a"], parts, merged

    mine = here.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group * 10.0)
    total, parts, merged = here.run(step, args=(mine,))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(total), [3.0, 3.0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(parts), [[0.0, 0.0], [10.0, 10.0], [10.0, 10.0]])
    assert float(merged) == 5.0
    rows = np.ones((choros.rank() + 1,), "float32") * choros.rank()
    assert float(here.reduce("MEAN", rows, axis=0)) == pytest.approx(2 / 3)
    assert float(here.reduce("SUM", rows, axis=0)) == 2.0
    many = keras.ops.ones(1000 * (choros.rank() + 1), "bfloat16")  # which NumPy adds up to 256
    assert float(here.reduce("MEAN", many, axis=0)) == 1.0
    np.testing.assert_array_equal(here.gather(rows, axis=0), [0.0, 1.0, 1.0])
    columns = np.ones((2, choros.rank() + 1), "float32") * choros.rank()
    np.testing.assert_array_equal(here.gather(columns, axis=1), [[0.0, 1.0, 1.0]] * 2)
    with pytest.warns(DeprecationWarning, match="use run"):
        assert here.experimental_run_v2(lambda x: x + 1, args=(1,)) == 2


def case_initial_weights_are_identical():
    keras.utils.set_random_seed(7 + choros.rank())
    with strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    kernel = weights(model)[0]
    np.testing.assert_array_equal(kernel, broadcast_object(kernel))
    seed = np.asarray(keras.ops.convert_to_numpy(model.layers[-1].seed_generator.state.value)).tolist()
    first, second = allgather_object(seed)
    assert first == second


# ── invalid uses ──────────────────────────────────────────────────────────────────────────────────────


def case_keras_classes_are_as_they_were_when_the_last_scope_is_left():
    def attributes() -> list[int]:
        kinds = {each for kind in (keras.Model, keras.Metric, keras.optimizers.Adam) for each in kind.__mro__[:-1]}
        kinds |= {*keras.Variable.__mro__[:-1], keras.random.SeedGenerator, keras.layers.BatchNormalization}
        ordered = sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__))
        return [id(vars(kind).get(name)) for kind in ordered for name in ("__init__", "add_weight", "apply", "compile")]

    here, before = strategy(), attributes()
    with here.scope():
        inside = attributes()
        with here.scope():
            assert attributes() == inside
        here.run(lambda: None)
        assert attributes() == inside != before
    assert attributes() == before
    here.run(lambda: None)
    assert attributes() == before


def case_invalid_uses_raise_errors_with_advice():
    here = strategy()
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with here.scope():
        assert distribute.has_strategy()
        assert distribute.in_cross_replica_context()
        assert distribute.get_strategy() is here
        assert distribute.get_replica_context() is None
        with pytest.raises(StrategyError, match="created outside the scope"):
            other.compile("sgd", "mse")
        with (
            pytest.raises(StrategyError, match="one strategy's scope at a time"),
            distribute.OneDeviceStrategy("cpu").scope(),
        ):
            pass
        optimizer = keras.optimizers.SGD(0.1)
        model = build()
    assert not distribute.has_strategy()
    other.compile("sgd", "mse")  # outside, Keras is not patched
    optimizer.build(model.trainable_variables)
    with pytest.raises(StrategyError, match=r"strategy\.run"):
        optimizer.apply([keras.ops.zeros(v.shape) for v in model.trainable_variables])
    with pytest.raises(StrategyError, match="inside a replica"):
        here.run(lambda: here.reduce("SUM", 1.0, axis=None))
    with pytest.raises(StrategyError, match="inside a replica"):
        here.run(lambda: here.run(lambda: 1))
    with pytest.raises(ConfigError, match=r"SUM or ReduceOp\.MEAN"):
        here.reduce("MAX", 1.0, axis=None)
    with pytest.raises(ConfigError, match="no such dimension"):
        here.reduce("SUM", 1.0, axis=0)
    with pytest.raises(ConfigError, match="tuple or a list"):
        here.run(lambda x: x, args=3)
    with pytest.raises(ConfigError, match="global batch of 1 examples is smaller than the 2 replicas"):
        model.fit(*data(), batch_size=1, verbose=0)
    with pytest.raises(ConfigError, match="chorosrun -np 3"):
        distribute.MirroredStrategy(devices=["cpu:0", "cpu:1", "cpu:2"])
    with pytest.raises(ConfigError, match=r"one per process\. Leave devices out"):
        distribute.MirroredStrategy(devices=[])
    with pytest.raises(ConfigError, match="multiple of 2"):
        distribute.InputContext(2, 0, 2).get_per_replica_batch_size(33)
    # After these errors, the next collective works.
    assert here.reduce("SUM", 1.0, axis=None) == 2.0


def case_an_error_about_shapes_names_the_share_of_a_replica():
    with strategy().scope():
        model = keras.Sequential(
            [keras.Input((3, 2), batch_size=8), keras.layers.SimpleRNN(4, stateful=True), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=JIT)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each framework has its own
        model.fit(np.ones((16, 3, 2), "float32"), np.ones((16, 1), "float32"), batch_size=8, verbose=0)
    assert "a replica has its share of each global batch, 4 of 8 rows" in "".join(raised.value.__notes__)


def case_a_write_error_is_raised_on_all_processes():
    with strategy().scope():
        model = build()
    with pytest.raises((StrategyError, OSError, ValueError)) as caught:
        model.save("/no/such/directory/model.keras")
    assert (choros.rank() == 0) != ("process 0" in str(caught.value))
