"""What every process of the job of test_parameter_server.py runs; cases are called in this order, on the chief.

The job begins with one worker; a second one comes in the middle, is killed, and comes back. At the end a server is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest

from choros.distribute.coordinator import ClusterCoordinator
from choros.distribute.parameter_server import ParameterServerStrategy
from choros.distribute.partitioners import MinSizePartitioner
from choros.errors import ClosureCancelled, ConfigError, ParameterServerLost
from distribute.parameter_server_jobs import CASE, GATE

FRAMEWORK = keras.backend.backend()
DIRECTORY = Path(os.environ["TEST_DIRECTORY"])
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
WORKER = f"{TASK['index']}.{os.environ['TEST_LIFE']}"
X, Y = np.load(DIRECTORY / "x.npy"), np.load(DIRECTORY / "y.npy")
STEPS, BATCH = 20, 32
#: So many bytes are a shard's at least: of the kernels of the larger networks only.
SHARD = 64 * 20 * 4


class Watched(keras.Sequential):
    """A model that does something of its own before each step on a worker."""

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


def network(hidden, optimizer, seed=0, norm=False, name=None, dropout=False):
    def dense(units, index, **arguments):
        return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed + index), **arguments)

    layers = [keras.Input((64,)), dense(hidden, 1, activation="relu")]
    if norm:
        layers.append(keras.layers.BatchNormalization())
    if dropout:
        layers.append(keras.layers.Dropout(0.2, seed=7))
    model = Watched([*layers, dense(10, 2)], name=name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def steps_of(name):
    """How many steps each worker has done with a model."""
    return {path.suffixes[-2][1:] + path.suffix: path.stat().st_size for path in DIRECTORY.glob(f"{name}.steps.*.*")}


def count(name):
    with (DIRECTORY / f"{name}.steps.{WORKER}").open("a") as file:
        file.write("x")


def slowly():
    count("slow")
    time.sleep(0.08 if WORKER.startswith("1.") else 0.01)


def mortally():
    count("mortal")
    time.sleep(0.01)
    if WORKER == "1.1" and steps_of("mortal")["1.1"] == 3:
        (DIRECTORY / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


WATCHES = {"slow": slowly, "mortal": mortally}

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    "decayed": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5), clipnorm=0.1, weight_decay=0.1
    ),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, clipvalue=0.01),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
}


def models():
    """By name: cut and whole, with and without statistics."""
    made = {
        "adam": network(40, OPTIMIZERS["adam"](), dropout=True),
        "sgd": network(8, OPTIMIZERS["sgd"](), norm=True),
    }
    if FRAMEWORK == "torch":  # The others would compile each, three times.
        made["decayed"] = network(40, OPTIMIZERS["decayed"]())
        made["accumulating"] = network(40, OPTIMIZERS["accumulating"]())
        made["averaging"] = network(40, OPTIMIZERS["averaging"]())
    else:
        made["scaled"] = network(8, keras.optimizers.LossScaleOptimizer(OPTIMIZERS["adam"](), initial_scale=1024.0))
    return made


strategy = ParameterServerStrategy(variable_partitioner=MinSizePartitioner(SHARD, max_shards=3))
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    MODELS = models()
    PAIR = network(40, keras.optimizers.Adam(0.003), name="pair")
    SLOW = network(8, "adam", name="slow")
    MORTAL = network(8, "adam", name="mortal")
    CUSTOM = network(40, "sgd", name="custom")
    OPTIMIZER = keras.optimizers.Adam(0.01)
    ACCURACY = keras.metrics.SparseCategoricalAccuracy()
    OPTIMIZER.build(CUSTOM.trainable_variables)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(model, epochs=2, **arguments):
    rows = STEPS // 2 * BATCH
    return model.fit(X[:rows], Y[:rows], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments)


def assert_close(model, other):
    for one, another in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, another, rtol=2e-4, atol=2e-6)


# One worker.


def case_one_worker_ends_with_the_weights_of_one_device():
    alone = models()
    for name, model in MODELS.items():
        history, expected = train(model), train(alone[name])
        assert_close(model, alone[name])
        for metric, values in expected.history.items():
            np.testing.assert_allclose(history.history[metric], values, rtol=1e-3, err_msg=f"{name} {metric}")
        assert int(model.optimizer.iterations) == int(alone[name].optimizer.iterations)


def case_weights_and_learning_rates_set_on_the_chief_count():
    alone = network(40, OPTIMIZERS["adam"](), dropout=True)
    train(alone)
    zeros = [np.zeros_like(weight) for weight in alone.get_weights()]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 * (epoch + 1))
    for model in (MODELS["adam"], alone):
        model.set_weights(zeros)
        train(model, callbacks=[schedule], validation_data=(X[-64:], Y[-64:]))
    assert_close(MODELS["adam"], alone)
    np.testing.assert_allclose(MODELS["adam"].history.history["val_loss"], alone.history.history["val_loss"], rtol=1e-3)
    assert float(keras.ops.convert_to_numpy(MODELS["adam"].optimizer.learning_rate)) == np.float32(0.02)
    np.testing.assert_allclose(MODELS["adam"].predict(X[:8], verbose=0), alone.predict(X[:8], verbose=0), rtol=1e-3)


def case_what_the_chief_saves_has_the_servers_weights():
    MODELS["sgd"].save(DIRECTORY / "model.keras")
    assert_close(keras.models.load_model(DIRECTORY / "model.keras", custom_objects={"Watched": Watched}), MODELS["sgd"])


def case_a_batch_at_a_time():
    alone = network(8, OPTIMIZERS["sgd"](), seed=5, norm=True)
    MODELS["sgd"].set_weights(alone.get_weights())
    logs = MODELS["sgd"].train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    expected = alone.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
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


def case_a_loop_of_ones_own():
    alone = network(40, keras.optimizers.Adam(0.01))
    losses = [float(alone.train_on_batch(*batch)[0]) for batch in batches()[:1]]
    for batch in batches()[1:]:
        alone.train_on_batch(*batch)
    step = {"tensorflow": step_in_tensorflow, "torch": step_in_torch, "jax": step_in_jax}[FRAMEWORK]()
    iterator = iter(DATASET)
    results = [coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS)]
    coordinator.join()
    assert coordinator.done()
    assert_close(CUSTOM, alone)
    np.testing.assert_allclose(coordinator.fetch(results)[0], losses[0], rtol=1e-4)
    assert isinstance(results[0].fetch(), (np.ndarray, np.generic)), type(results[0].fetch())
    assert int(keras.ops.convert_to_numpy(ACCURACY.count)) == STEPS * BATCH
    assert 0.2 < float(keras.ops.convert_to_numpy(ACCURACY.result())) < 1.0


def case_results_come_in_any_structure():
    scale = 3
    result = coordinator.schedule(lambda x, *, add: {"sum": (x * scale + add).sum()}, (np.arange(4.0),), {"add": 1})
    assert coordinator.fetch([result, 5]) == [{"sum": 22.0}, 5]
    assert result.get() == {"sum": 22.0}


def case_what_a_function_uses_is_as_it_was_when_it_was_scheduled():
    results = [coordinator.schedule(lambda x: x + 1, (number,)) for number in range(3)]
    assert coordinator.fetch(results) == [1, 2, 3]


class UsersError(Exception):
    pass


def case_an_error_is_raised_once_and_cancels_what_waits():
    def fail():
        time.sleep(0.1)
        raise UsersError("of the user")

    failed = coordinator.schedule(fail)
    waiting = coordinator.schedule(time.time)
    with pytest.raises(UsersError) as caught:
        coordinator.join()
    assert "in fail" in "".join(caught.value.__notes__), caught.value.__notes__
    with pytest.raises(UsersError):
        failed.fetch()
    with pytest.raises(ClosureCancelled):
        waiting.fetch()
    coordinator.join()
    assert coordinator.schedule(lambda: 7).fetch() == 7


def case_what_cannot_be_scheduled_is_an_error():
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
    with strategy.scope():
        late = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    coordinator.schedule(lambda: late.name)
    with pytest.raises(ConfigError, match="before the first schedule"):
        coordinator.join()


# A second worker comes.


def come(worker):
    """Lets a worker go on, and waits until it takes part."""
    Path(GATE.format(DIRECTORY, "worker", worker)).touch()

    def who():
        time.sleep(0.02)
        return f"{json.loads(os.environ['TF_CONFIG'])['task']['index']}.{os.environ['TEST_LIFE']}"

    while worker not in coordinator.fetch([coordinator.schedule(who) for _ in range(2)]):
        pass


def case_with_two_reach_the_accuracy_of_one_device():
    come("1.1")
    alone = network(40, keras.optimizers.Adam(0.003))
    for model in (PAIR, alone):
        model.fit(X, Y, batch_size=BATCH, epochs=8, verbose=0)
    pair, one = (model.evaluate(X, Y, verbose=0)[1] for model in (PAIR, alone))
    assert one > 0.95
    assert abs(pair - one) <= 0.01, (pair, one)


def case_with_two_a_slow_worker_does_fewer_steps_and_holds_nobody_up():
    # All workers have compiled the step when the first epoch is over.
    train(SLOW, epochs=2)
    for path in DIRECTORY.glob("slow.steps.*"):
        path.unlink()
    train(SLOW, epochs=4)
    steps = steps_of("slow")
    assert sum(steps.values()) == 4 * STEPS // 2, steps
    assert steps["0.1"] > 2 * steps.get("1.1", 0), steps


class UntilKilled(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = (DIRECTORY / "killed").exists()


def case_with_two_a_worker_that_is_killed_loses_no_batch():
    history = train(MORTAL, epochs=1000, callbacks=[UntilKilled()])
    assert (DIRECTORY / "killed").exists()
    loss = next(metric for metric in MORTAL.metrics if metric.name == "loss")
    assert int(keras.ops.convert_to_numpy(loss.count)) == STEPS // 2 * BATCH
    epochs = len(history.epoch)
    steps = steps_of("mortal")
    assert steps["1.1"] == 3
    assert steps["0.1"] == epochs * STEPS // 2 - 2, (steps, epochs)


def case_with_two_a_worker_that_comes_back_takes_part():
    come("1.2")

    class UntilBack(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = "1.2" in steps_of("mortal")

    train(MORTAL, epochs=1000, callbacks=[UntilBack()])
    assert steps_of("mortal")["1.2"] > 0


def lose_a_server():
    os.kill(int((DIRECTORY / "ps 1.pid").read_text()), signal.SIGKILL)
    try:
        train(MODELS["adam"])
    except ParameterServerLost:
        print(CASE + json.dumps({"a_lost_server": ""}), flush=True)
        raise


def main():
    while not Path(GATE.format(DIRECTORY, TASK["type"], WORKER)).exists():
        time.sleep(0.02)
    with_two = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 2
    for name, case in list(globals().items()):
        if name.startswith("case_") and (with_two or not name.startswith("case_with_two_")):
            begin = time.perf_counter()
            try:
                case()
                error = ""
            except Exception:  # noqa: BLE001  (all that may go wrong is the result)
                error = traceback.format_exc()
            print(CASE + json.dumps({name: error}), f"{time.perf_counter() - begin:.1f} s", flush=True)
    if with_two:
        lose_a_server()


main()
