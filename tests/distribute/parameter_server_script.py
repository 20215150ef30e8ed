"""The script that every process of the job of test_parameter_server.py runs; the chief runs the cases in this order.

The job begins with one worker; a second one joins later, is killed, and is restarted. At the end a server is killed.
"""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
import warnings
import zipfile
from contextlib import nullcontext
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from choros.distribute.coordinator import ClusterCoordinator
from choros.distribute.partitioners import MinSizePartitioner
from choros.errors import ClosureCancelled, ConfigError, ParameterServerLost, StrategyError
from choros.parameter_server import ParameterServerStrategy
from distribute import parameter_server_common as common
from distribute.parameter_server_common import BATCH, FRAMEWORK, SHARD, STEPS, WORKER, X, Y, assert_close, train
from distribute.parameter_server_jobs import CASE

HERE = Path()
SCRIPT = "parameter_server_script"


class Watched(keras.Sequential):
    """A model that calls a test's function before each step on a worker."""

    def make_train_function(self, force=False):
        before = self.train_function
        super().make_train_function(force)
        if self.train_function is not before:
            own, watch = self.train_function, WATCHES.get(self.name)

            def function(*args):
                if watch is not None:
                    watch()
                return own(*args)

            self.train_function = function


def network(hidden, optimizer, **arguments):
    return common.network(hidden, optimizer, kind=Watched, **arguments)


def pid_of(process):
    return int(Path(f"{SCRIPT}.{process}.pid").read_text())


def steps_of(name):
    """Returns the number of steps that each worker has done with a model."""
    return {path.suffixes[-2][1:] + path.suffix: path.stat().st_size for path in HERE.glob(f"{name}.steps.*.*")}


def count(name):
    with Path(f"{name}.steps.{WORKER}").open("a") as file:
        file.write("x")


def slowly():
    """From the second step on, a step of the second worker lasts until all others have begun."""
    count("slow")
    if sum(steps_of("slow").values()) == 1:
        return  # The chief waits for the first step before it sends others.
    while "1.1" not in steps_of("slow") or (WORKER == "1.1" and sum(steps_of("slow").values()) < STEPS // 2):
        time.sleep(0.01)


def mortally():
    count("mortal")
    time.sleep(0.01)
    if WORKER == "1.1" and steps_of("mortal")["1.1"] == 3:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


WATCHES = {"slow": slowly, "mortal": mortally}

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    "decayed": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5), clipnorm=0.1, weight_decay=0.1
    ),
    "accumulating": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5), gradient_accumulation_steps=4, clipvalue=0.01
    ),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
}


def models():
    """Returns models by name: sharded and whole, with and without statistics."""
    models = {
        "adam": network(40, OPTIMIZERS["adam"]()),
        "sgd": network(8, OPTIMIZERS["sgd"](), norm=True),
    }
    if FRAMEWORK == "torch":  # The other frameworks would compile each model three times.
        models["decayed"] = network(40, OPTIMIZERS["decayed"]())
        models["accumulating"] = network(40, OPTIMIZERS["accumulating"]())
        models["averaging"] = network(40, OPTIMIZERS["averaging"]())
    else:
        models["scaled"] = network(8, keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](), initial_scale=1024.0))
    return models


strategy = ParameterServerStrategy(variable_partitioner=MinSizePartitioner(SHARD, max_shards=3))
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    MODELS = models()
    PAIR = network(40, keras.optimizers.Adam(0.02), name="pair")
    SLOW = network(8, "adam", name="slow")
    MORTAL = network(8, "adam", name="mortal")
    CUSTOM = network(40, "sgd", name="custom")
    OPTIMIZER = keras.optimizers.Adam(0.01)
    ACCURACY = keras.metrics.SparseCategoricalAccuracy()
    OPTIMIZER.build(CUSTOM.trainable_variables)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# One worker.


ALONE = {}


def case_one_worker_ends_with_the_weights_of_one_device():
    ALONE.update(models())
    for name, model in MODELS.items():
        history, expected = train(model), train(ALONE[name])
        assert_close(model.get_weights(), ALONE[name].get_weights())
        for metric, values in expected.history.items():
            np.testing.assert_allclose(history.history[metric], values, rtol=1e-3, err_msg=f"{name} {metric}")


def values_of(path):
    """Returns the values in a Keras file, by name."""
    found = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset) and "seed_generator" not in name:
            found[name] = item[()]

    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(note)
    return found


def case_the_chief_saves_the_same_as_one_device():
    for name, model in MODELS.items():
        model.save(f"{name}.keras")
        ALONE[name].save(f"{name}.alone.keras")
        saved, expected = values_of(f"{name}.keras"), values_of(f"{name}.alone.keras")
        assert saved.keys() == expected.keys()
        for key in saved:
            np.testing.assert_allclose(saved[key], expected[key], rtol=2e-4, atol=2e-6, err_msg=f"{name} {key}")


def case_a_saved_model_continues_training_outside_the_job():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outside = keras.models.load_model("adam.keras", custom_objects={"Watched": Watched})
    MODELS["adam"].save_weights("adam.weights.h5")
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        tf.train.Checkpoint(model=MODELS["adam"], optimizer=MODELS["adam"].optimizer).write("adam.checkpoint")
    for model in (outside, ALONE["adam"], MODELS["adam"]):
        train(model)
    assert_close(outside.get_weights(), ALONE["adam"].get_weights())
    assert_close(MODELS["adam"].get_weights(), ALONE["adam"].get_weights())
    ALONE["adam"].save("adam.expected.keras")


def case_weights_and_learning_rates_set_on_the_chief_are_used():
    alone = ALONE["adam"]
    zeros = [np.zeros_like(weight) for weight in alone.get_weights()]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 * (epoch + 1))
    for model in (MODELS["adam"], alone):
        model.set_weights(zeros)
        train(model, callbacks=[schedule], validation_data=(X[-64:], Y[-64:]))
    assert_close(MODELS["adam"].get_weights(), alone.get_weights())
    np.testing.assert_allclose(MODELS["adam"].history.history["val_loss"], alone.history.history["val_loss"], rtol=1e-3)
    assert float(keras.ops.convert_to_numpy(MODELS["adam"].optimizer.learning_rate)) == np.float32(0.02)
    np.testing.assert_allclose(MODELS["adam"].predict(X[:8], verbose=0), alone.predict(X[:8], verbose=0), rtol=1e-3)


def case_train_on_batch():
    logs, expected = (
        model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True) for model in (MODELS["adam"], ALONE["adam"])
    )
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-4)


def batches():
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, STEPS * BATCH, BATCH)]


def make_dataset():
    if FRAMEWORK != "tensorflow":
        return batches()
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X[: STEPS * BATCH], Y[: STEPS * BATCH])).batch(BATCH)


def step_in_tensorflow():
    import tensorflow as tf

    @tf.function
    def step(iterator):
        def on_replica(x, y):
            with tf.GradientTape() as tape:
                logits = CUSTOM(x, training=True)
                loss = LOSS(y, logits)
            OPTIMIZER.apply_gradients(
                zip(tape.gradient(loss, CUSTOM.trainable_variables), CUSTOM.trainable_variables, strict=True)
            )
            ACCURACY.update_state(y, logits)
            return loss

        return strategy.reduce("SUM", strategy.run(on_replica, args=next(iterator)), axis=None)

    return step


def step_in_torch():
    import torch

    def step(iterator):
        def on_replica(x, y):
            logits = CUSTOM(x, training=True)
            loss = LOSS(y, logits)
            CUSTOM.zero_grad()
            loss.backward()
            with torch.no_grad():
                OPTIMIZER.apply([v.value.grad for v in CUSTOM.trainable_variables], CUSTOM.trainable_variables)
            ACCURACY.update_state(y, logits)
            return loss.detach()

        return strategy.reduce("SUM", strategy.run(on_replica, args=next(iterator)), axis=None)

    return step


def step_in_jax():
    import jax

    @jax.jit
    def update(trained, others, state, x, y):
        def loss_of(trained):
            logits, _ = CUSTOM.stateless_call(trained, others, x, training=True)
            return LOSS(y, logits), logits

        (loss, logits), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        trained, state = OPTIMIZER.stateless_apply(state, gradients, trained)
        return loss, logits, trained, state

    def step(iterator):
        x, y = next(iterator)
        trained, others = ([v.value for v in vs] for vs in (CUSTOM.trainable_variables, CUSTOM.non_trainable_variables))
        loss, logits, trained, state = update(trained, others, [v.value for v in OPTIMIZER.variables], x, y)
        for variable, value in zip(
            [*CUSTOM.trainable_variables, *OPTIMIZER.variables], [*trained, *state], strict=True
        ):
            variable.assign(value)
        ACCURACY.update_state(y, logits)
        return loss

    return step


DATASET = coordinator.create_per_worker_dataset(make_dataset)


def case_a_custom_training_loop():
    alone = network(40, keras.optimizers.Adam(0.01))
    losses = [float(alone.train_on_batch(*batch)[0]) for batch in batches()[:1]]
    for batch in batches()[1:]:
        alone.train_on_batch(*batch)
    step = {"tensorflow": step_in_tensorflow, "torch": step_in_torch, "jax": step_in_jax}[FRAMEWORK]()
    iterator = iter(DATASET)
    results = [coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS)]
    coordinator.join()
    assert coordinator.done()
    assert_close(CUSTOM.get_weights(), alone.get_weights())
    np.testing.assert_allclose(coordinator.fetch(results)[0], losses[0], rtol=1e-4)
    assert isinstance(results[0].fetch(), (np.ndarray, np.generic)), type(results[0].fetch())
    assert int(keras.ops.convert_to_numpy(ACCURACY.count)) == STEPS * BATCH
    assert 0.2 < float(keras.ops.convert_to_numpy(ACCURACY.result())) < 1.0


def case_results_may_have_any_structure():
    scale = 3
    result = coordinator.schedule(lambda x, *, add: {"sum": (x * scale + add).sum()}, (np.arange(4.0),), {"add": 1})
    assert coordinator.fetch([result, 5]) == [{"sum": 22.0}, 5]
    assert result.get() == {"sum": 22.0}


def case_arguments_are_captured_when_scheduled():
    results = [coordinator.schedule(lambda x: x + 1, (number,)) for number in range(3)]
    assert coordinator.fetch(results) == [1, 2, 3]


class UsersError(Exception):
    pass


def case_an_error_is_raised_once_and_cancels_waiting_functions():
    def fail():
        while not Path("scheduled").exists():
            time.sleep(0.01)
        raise UsersError("of the user")

    failed = coordinator.schedule(fail)
    waiting = coordinator.schedule(time.time)
    Path("scheduled").touch()
    with pytest.raises(UsersError) as caught:
        coordinator.join()
    assert "in fail" in "".join(caught.value.__notes__), caught.value.__notes__
    with pytest.raises(UsersError):
        failed.fetch()
    with pytest.raises(ClosureCancelled):
        waiting.fetch()
    coordinator.join()
    assert coordinator.schedule(lambda: 7).fetch() == 7


def case_invalid_functions_and_arguments_are_errors():
    result = coordinator.schedule(lambda: 7)
    stranger, lock = keras.layers.Dense(1), threading.Lock()
    for function, args, text in (
        (7, (), "takes a function"),
        (lambda x: x, (result,), "RemoteValue"),
        (lambda: stranger.name, (), "do not have"),
        (lambda: lock.locked(), (), "cannot be sent"),
    ):
        with pytest.raises(ConfigError, match=text):
            coordinator.schedule(function, args)


def case_objects_created_after_the_first_schedule():
    rows = slice(STEPS // 2 * BATCH)
    with strategy.scope():
        model = network(40, keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](), initial_scale=1024.0))
        seen = keras.metrics.Sum()
    alone = network(40, keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](), initial_scale=1024.0))
    for each in (model, alone):
        train(each)
    assert_close(model.get_weights(), alone.get_weights())

    def measure(iterator):
        x, y = next(iterator)
        seen.update_state(np.ones(len(x)))
        return model.test_on_batch(x, y)[0]

    iterator = iter(coordinator.create_per_worker_dataset(lambda: [(X[rows], Y[rows])]))
    loss = coordinator.schedule(measure, (iterator,)).fetch()
    np.testing.assert_allclose(loss, alone.evaluate(X[rows], Y[rows], verbose=0)[0], rtol=1e-4)
    coordinator.join()
    assert float(keras.ops.convert_to_numpy(seen.result())) == STEPS // 2 * BATCH
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for each, scope in ((model, strategy.scope()), (alone, nullcontext())):
        each.layers[0].trainable = False
        with scope:
            each.compile(keras.optimizers.SGD(0.1), loss, loss_weights=[0.5])
        train(each)
    assert_close(model.get_weights(), alone.get_weights())


class Unsendable(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def call(self, x):
        return x


def case_a_refused_function_is_refused_for_the_same_reason_again():
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), Unsendable(), keras.layers.Dense(1)], name="locked")
    for _ in range(2):
        coordinator.schedule(lambda: model.name)
        with pytest.raises(ConfigError, match=r"'locked', which worker 0 does not have and cannot be sent .*lock"):
            coordinator.join()
    assert coordinator.schedule(lambda: 7).fetch() == 7


def case_signals_end_only_the_chief():
    for process in ("ps 0", "worker 0"):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid_of(process), number)
    with pytest.raises(StrategyError, match="applied on the chief"):
        OPTIMIZER.apply([np.zeros(v.shape, "float32") for v in CUSTOM.trainable_variables])
    assert coordinator.schedule(lambda: 7).fetch() == 7


# A second worker joins.


def case_with_two_reach_the_accuracy_of_one_device():
    common.admit_worker(SCRIPT, coordinator, "1.1")
    alone = network(40, keras.optimizers.Adam(0.02))
    for model in (PAIR, alone):
        model.fit(X, Y, batch_size=4 * BATCH, epochs=12, verbose=0)
        # With small steps both converge: the effect of late updates is then small.
        model.optimizer.learning_rate = 0.002
        model.fit(X, Y, batch_size=4 * BATCH, epochs=12, verbose=0)
    pair, one = (model.evaluate(X, Y, verbose=0)[1] for model in (PAIR, alone))
    assert one > 0.95
    assert abs(pair - one) <= 0.01, (pair, one)


def case_with_two_a_slow_worker_does_fewer_steps_and_does_not_block_others():
    train(SLOW, epochs=1)
    steps = steps_of("slow")
    assert sum(steps.values()) == STEPS // 2, steps
    assert steps["0.1"] >= STEPS // 2 - 2, steps


class UntilKilled(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = Path("killed").exists()


def case_with_two_a_killed_worker_loses_no_batch():
    history = train(MORTAL, epochs=1000, callbacks=[UntilKilled()])
    assert Path("killed").exists()
    loss = next(metric for metric in MORTAL.metrics if metric.name == "loss")
    assert int(keras.ops.convert_to_numpy(loss.count)) == STEPS // 2 * BATCH
    epochs = len(history.epoch)
    steps = steps_of("mortal")
    assert steps["1.1"] == 3
    assert steps["0.1"] == epochs * STEPS // 2 - 2, (steps, epochs)


def case_with_two_a_restarted_worker_participates():
    common.admit_worker(SCRIPT, coordinator, "1.2")

    class UntilBack(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = "1.2" in steps_of("mortal")

    train(MORTAL, epochs=1000, callbacks=[UntilBack()])
    assert steps_of("mortal")["1.2"] > 0


def lose_a_server():
    os.kill(pid_of("ps 1"), signal.SIGKILL)
    try:
        train(MODELS["adam"])
    except ParameterServerLost:
        print(CASE + json.dumps({"a_lost_server": ""}), flush=True)
        raise


if __name__ == "__main__":
    common.run_cases(dict(globals()))
    if len(common.CLUSTER["worker"]) == 2:
        lose_a_server()
