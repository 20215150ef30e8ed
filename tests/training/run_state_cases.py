"""A run of ``fit`` that another model continues in the middle of an epoch, from a commit on disk."""

import itertools
import random
import tempfile

import keras
import numpy as np
import pytest

import choros.keras
from choros.elastic.commit_store import CommitStore
from choros.errors import ConfigError
from choros.training import run_state
from choros.training.run_state import RunCallback, RunState
from choros.training.trainer import Steps, attach

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 5)).astype("float32"), RNG.normal(size=(48, 1)).astype("float32")
BATCH, STEP = 8, 2


def build(seed):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(4, dtype="bfloat16"),
        keras.layers.Dense(1, dtype="float32"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


class Drawing(keras.callbacks.Callback):
    """Draws from Python's and NumPy's streams, and from Keras' own; counts in an argument; has a limit."""

    def __init__(self, limit, count=0):
        super().__init__()
        self.limit, self.count, self.drawn, self.by_step = limit, count, [], {}
        self.own = object()

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        uniform = keras.ops.convert_to_numpy(keras.random.uniform(()))
        self.drawn.append((random.random(), np.random.random(), float(uniform)))
        self.by_step[self.count] = np.array(logs["loss"])


class Captures(keras.callbacks.Callback):
    """In the middle of the last epoch, commits the state."""

    def __init__(self, store, **arguments):
        super().__init__()
        self.store, self.arguments, self.others = store, arguments, []

    def on_train_begin(self, logs=None):
        self.run = RunState(self.model, [*self.others, self.model.history])

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, STEP):
            self.store.write(self.run.capture(epoch=1, position={"step": batch}, **self.arguments))


class Restores(Captures):
    """Before the first step, restores the state."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.state = self.store.load_last()
            self.run.restore(self.state, batch=(X[:BATCH], Y[:BATCH]))


def others(limit):
    early = keras.callbacks.EarlyStopping("loss", min_delta=0.01, patience=9, restore_best_weights=True)
    return [early, keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0), Drawing(limit)]


def fit(model, first, callbacks, data=slice(None)):
    callbacks[0].others = callbacks[1:]
    x, y = X[data], Y[data]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, initial_epoch=first, epochs=2, callbacks=callbacks)
    return model


def pairs_of(one, other):
    """The weights and optimizers' states of two models, in pairs."""
    pairs = zip([*one.weights, *one.optimizer.variables], [*other.weights, *other.optimizer.variables], strict=True)
    return [tuple(keras.ops.convert_to_numpy(keras.ops.cast(each, "float32")) for each in pair) for pair in pairs]


def case_another_model_continues_in_the_middle_of_an_epoch_as_if_nothing_had_happened():
    store = CommitStore(tempfile.mkdtemp())
    whole, continued = [Captures(store), *others(3)], [Restores(store), *others(4)]
    model = fit(build(1), 0, whole)
    again = fit(build(2), 1, continued, slice(STEP * BATCH, None))
    assert (continued[0].state["epoch"], continued[0].state["position"]) == (1, {"step": STEP})
    for one, other in pairs_of(model, again):
        np.testing.assert_array_equal(one, other)
    assert model.history.epoch == again.history.epoch == [0, 1]
    assert model.history.history == again.history.history
    for callback, other in zip(whole[1:3], continued[1:3], strict=True):
        plain = (int, float, str, type(None))
        state = {name: value for name, value in vars(callback).items() if isinstance(value, plain)}
        assert {name: vars(other)[name] for name in state} == state
    drawing, other = whole[3], continued[3]
    assert (drawing.count, drawing.drawn, drawing.by_step) == (other.count, other.drawn, other.by_step)
    assert (drawing.count, other.limit) == (12, 4)


def case_a_process_that_joins_counts_no_examples_of_others():
    store = CommitStore(tempfile.mkdtemp())
    fit(build(1), 0, [Captures(store, metrics=False), *others(3)])
    joining = fit(build(2), 1, [Restores(store), *others(3)], slice(STEP * BATCH, None))
    (tracker,) = [each for each in joining.metrics if each.name == "loss"]
    assert float(tracker.count) == len(X) - STEP * BATCH


def case_a_state_of_another_model_is_refused_and_changes_nothing():
    model = build(1)
    state = RunState(model, []).capture(epoch=0)
    other = keras.Sequential([keras.Input((5,)), *model.layers[:-1], keras.layers.Dense(2)])
    other.compile(keras.optimizers.AdamW(0.01), "mse")
    before = [np.array(weight) for weight in other.get_weights()]
    of_weights = r"commit in runs/fit-1 .* weight 8 is float32 of shape \(4, 1\) in it, and float32 of shape \(4, 2\)"
    with pytest.raises(ConfigError, match=of_weights):
        RunState(other, [], "the commit in runs/fit-1").restore(state)
    with pytest.raises(ConfigError, match=r"it has 3 variables of optimizer 1, and the model has \d+\. .*--commit-dir"):
        RunState(model, []).restore(state | {"optimizers": [state["optimizers"][0][:3]]})
    for one, weight in zip(before, other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, weight)


def case_one_rank_captures_for_another():
    """Ranks have other callbacks, and capturing communicates with nobody."""
    model = build(1 + choros.rank())
    callbacks = [Drawing(3), *([keras.callbacks.ModelCheckpoint("x.keras")] if choros.rank() == 0 else [])]
    callbacks[0].count = 10 * choros.rank()
    run = RunState(model, callbacks)
    callbacks[0].count += 7
    state = choros.keras.broadcast_object(run.capture(epoch=2) if choros.rank() == 1 else None, root_rank=1)
    if choros.rank() == 0:
        run.restore(state)
    assert callbacks[0].count == 17
    assert len(set(choros.keras.allgather_object(float(sum(weight.sum() for weight in model.get_weights()))))) == 1


def case_commits_find_what_training_has_prepared(monkeypatch):
    """They do not prepare all layers of the model once more, each time."""
    model = build(1)
    directory = choros.keras.broadcast_object(tempfile.mkdtemp() if choros.rank() == 0 else None)
    commits = RunCallback([], directory, lambda: None)
    commits.set_params({"epochs": 1})
    commits.set_model(model)
    model.history = keras.callbacks.History()
    attach(model)
    monkeypatch.setattr(Steps, "prepare", lambda steps: pytest.fail("prepared again"))
    commits.on_train_begin()
    commits.on_train_end()


def case_the_fit_after_one_that_goes_on_has_all_of_its_epochs(monkeypatch):
    directory = choros.keras.broadcast_object(tempfile.mkdtemp() if choros.rank() == 0 else None)
    for epochs in (1, 3):  # of the job, and of the same that goes on
        monkeypatch.setattr(run_state, "_calls", itertools.count(1))
        model = build(1)
        attach(model)
        first = model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[RunCallback([], directory, lambda: None)])
    assert (first.epoch, int(model.optimizer.iterations)) == ([0, 1, 2], 6)
    again = model.fit(X, Y, epochs=3, verbose=0, callbacks=[RunCallback([], directory, lambda: None)])
    assert again.epoch == [0, 1, 2]
