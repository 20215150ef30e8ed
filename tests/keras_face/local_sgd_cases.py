"""Local SGD, DiLoCo and compressions in ``model.fit``; on two ranks of each framework."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.errors import ConfigError, NotInitializedError
from harness import ROOT
from keras_face.training_cases import (
    BATCH,
    EVEN,
    OPTIMIZERS,
    UNEVEN,
    assert_same_history,
    assert_same_weights,
    build,
    communicator,
    data,
    fit,
    reference,
    weights,
)

STEPS = EVEN // BATCH


def assert_same_on_all_ranks(model: keras.Model) -> None:
    for weight in weights(model):
        np.testing.assert_array_equal(weight, hvd.broadcast(weight, 0))


def train(callback: keras.callbacks.Callback, *args: object, optimizer: str = "plain", **kwargs: object) -> keras.Model:
    model = build(same_start=False, optimizer=OPTIMIZERS[optimizer]())
    fit(model, *(args or (hvd.shard(data(EVEN), batch_size=BATCH),)), callbacks=[callback], **kwargs)
    assert_same_on_all_ranks(model)
    return model


def case_averaging_at_every_step_equals_training_on_whole_batches():
    expected, theirs = reference("plain", UNEVEN)
    model = build(same_start=False, optimizer=OPTIMIZERS["plain"]())
    callbacks = [hvd.LocalSGDCallback(every=1), hvd.callbacks.MetricAverageCallback()]
    ours = fit(model, hvd.shard(data(), batch_size=BATCH), callbacks=callbacks)
    assert_same_weights(model, expected)
    assert_same_history({"accuracy": ours["accuracy"][:1]}, {"accuracy": theirs["accuracy"][:1]})


def case_outer_step_of_rate_1_without_momentum_is_averaging():
    averaged = train(hvd.LocalSGDCallback(every=3), optimizer="adam")
    outer = hvd.DiLoCoCallback(every=3, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False)
    assert_same_weights(train(outer, optimizer="adam"), averaged)


def case_ranks_with_different_numbers_of_batches():
    x, y = data(96)
    mine = slice(0, 80) if hvd.rank() == 0 else slice(80, 96)
    for callback in (hvd.LocalSGDCallback(every=2), hvd.DiLoCoCallback(every=2)):
        metrics = hvd.callbacks.MetricAverageCallback()
        model = build(same_start=False, optimizer="adam")
        validation = data(16 + hvd.rank())
        fit(model, x[mine], y[mine], batch_size=16, validation_data=validation, callbacks=[callback, metrics])
        assert_same_on_all_ranks(model)


def case_each_of_several_steps_in_one_call_counts():
    if keras.backend.backend() == "torch":
        return  # It has no steps_per_execution.
    model = build(same_start=False, optimizer=OPTIMIZERS["plain"](), steps_per_execution=2)
    before = communicator().bytes_sent
    shard = hvd.shard(data(EVEN), batch_size=BATCH)
    fit(model, shard, callbacks=[hvd.LocalSGDCallback(every=2)], epochs=1)
    start = sum(variable.nbytes for variable in initial_state(model)) if hvd.rank() == 0 else 0
    assert communicator().bytes_sent - before == start + STEPS // 2 * 4 * model.count_params()
    assert_same_on_all_ranks(model)


def initial_state(model: keras.Model) -> list[np.ndarray]:
    """The variables that rank 0 broadcasts when training begins."""
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def case_bytes_are_those_of_every_step_divided():
    before = communicator().bytes_sent
    model = train(hvd.LocalSGDCallback(every=4, compression=hvd.Compression.fp16), epochs=3)
    sent = communicator().bytes_sent - before - 4 * model.count_params() * (hvd.rank() == 0)  # the check at the end
    start = sum(variable.nbytes for variable in initial_state(model)) if hvd.rank() == 0 else 0
    assert sent == start + 3 * STEPS // 4 * 2 * model.count_params()


def case_ranks_outside_the_process_set_train_alone():
    own = hvd.add_process_set([0])
    model = build(same_start=False, optimizer=OPTIMIZERS["plain"]())
    fit(model, *data(EVEN), batch_size=BATCH, callbacks=[hvd.LocalSGDCallback(every=2, process_set=own)])
    alone = build(same_start=False, optimizer=OPTIMIZERS["plain"]())
    fit(alone, *data(EVEN), batch_size=BATCH, callbacks=[])
    assert_same_weights(model, alone)
    hvd.remove_process_set(own)


def case_invalid_arguments_are_errors():
    with pytest.raises(ConfigError, match="every=0: there must be 1 step or more"):
        hvd.LocalSGDCallback(every=0)
    with pytest.raises(ConfigError, match="outer momentum 1"):
        hvd.DiLoCoCallback(outer_momentum=1)
    with pytest.raises(NotInitializedError):
        hvd.LocalSGDCallback(every=1, process_set=hvd.ProcessSet([0]))
    model = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["plain"]()))
    with pytest.raises(ConfigError, match="the optimizer is distributed, so ranks reduce gradients at every step"):
        fit(model, *data(EVEN), callbacks=[hvd.LocalSGDCallback(every=2)])


# ── learning ─────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = np.load(ROOT / "examples" / "digits.npz").values()
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order, :, :, np.newaxis] / 16).astype("float32"), labels[order]


@functools.cache
def learned(contender: str) -> float:
    """The accuracy of a CNN on held-out digits."""
    compressions = {"none": hvd.Compression.none, "power_sgd": hvd.Compression.power_sgd(4)}
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(6e-3)
    if contender in compressions:
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compressions[contender])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = digits()
    callback = hvd.DiLoCoCallback(2, outer_momentum=0.5) if contender == "diloco" else hvd.callbacks.Throughput()
    fit(model, hvd.shard((x[:1280], y[:1280]), batch_size=128, shuffle=True), epochs=25, callbacks=[callback])
    assert_same_on_all_ranks(model)
    return float(model.evaluate(x[1280:], y[1280:], verbose=0, return_dict=True)["accuracy"])


def case_digits_are_learned_as_well_as_with_synchronous_training():
    accuracies = {name: learned(name) for name in ("none", "power_sgd", "diloco")}
    assert accuracies["none"] > 0.97
    assert all(abs(value - accuracies["none"]) <= 0.01 for value in accuracies.values()), accuracies
