"""TensorBoard's files without TensorFlow. Run by ``test_tensorboard.py``."""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

from choros.errors import ConfigError
from choros.keras.callbacks import TensorBoard
from choros.training.callbacks import FirstRankCallback
from choros.training.tensorboard import stand_in_for
from event_files import scalars, values

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def network(optimizer: str = "sgd") -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")], name="net")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def written(callback, model=None, **arguments) -> tuple[Path, dict[str, list[float]]]:
    """The directory of the files, and the history."""
    callback.log_dir = tempfile.mkdtemp()
    model = network() if model is None else model
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[callback], **arguments)
    return Path(callback.log_dir), history.history


def only_file(directory: Path) -> Path:
    (file,) = directory.iterdir()
    return file


def steps_of(numbers: list[float]) -> list:
    return list(enumerate(map(pytest.approx, numbers)))


def case_metrics_of_epochs():
    directory, history = written(TensorBoard(), validation_data=(X[:8], Y[:8]))
    trained = scalars(only_file(directory / "train"))
    assert trained.keys() == {"epoch_loss", "epoch_mae", "epoch_learning_rate"}
    assert trained["epoch_loss"] == steps_of(history["loss"])
    assert trained["epoch_learning_rate"] == steps_of([0.01, 0.01])
    held_out = scalars(only_file(directory / "validation"))
    assert held_out["epoch_mae"] == steps_of(history["val_mae"])
    assert [step for step, _ in held_out["evaluation_loss_vs_iterations"]] == [4, 8]


def case_a_rank_that_becomes_the_first_goes_on_counting_batches(monkeypatch):
    monkeypatch.setattr("choros.training.tensorboard.is_initialized", lambda: True)
    monkeypatch.setattr("choros.training.tensorboard.is_first", lambda: callback._batches > 2)
    callback = TensorBoard(update_freq="batch")
    directory, _ = written(callback)
    assert [step for step, _ in scalars(only_file(directory / "train"))["batch_loss"]] == [3, 4, 5, 6, 7, 8]


def case_a_callback_of_the_first_rank_knows_the_model_only_there(monkeypatch):
    given = []

    class Writer(keras.callbacks.Callback):
        def set_model(self, model):
            given.append(model)
            super().set_model(model)

    for is_first in (False, True):
        monkeypatch.setattr("choros.training.callbacks.is_first", lambda is_first=is_first: is_first)
        model = network()
        model.fit(X, Y, verbose=0, callbacks=[FirstRankCallback(Writer())])
        assert given == ([model] if is_first else [])


def case_metrics_of_batches():
    directory, _ = written(TensorBoard(update_freq=3, write_steps_per_second=True))
    trained = scalars(only_file(directory / "train"))
    assert [step for step, _ in trained["batch_loss"]] == [3, 6]
    assert all(number > 0 for _, number in trained["batch_steps_per_second"] + trained["epoch_steps_per_second"])
    assert not (directory / "validation").exists()


def case_histograms_and_the_graph():
    directory, _ = written(TensorBoard(histogram_freq=1))
    found = [(step, value.tag) for step, value in values(only_file(directory / "train")) if value.HasField("histo")]
    assert found == [(epoch, f"net/out/{name}/histogram") for epoch in (0, 1) for name in ("kernel", "bias")]
    (graph,) = (value for _, value in values(only_file(directory / "train")) if value.tag == "keras")
    assert graph.metadata.plugin_data.plugin_name == "graph_keras_model"
    assert keras.models.model_from_json(graph.tensor.string_val[0].decode()).name == "net"


def case_evaluate_alone():
    callback = TensorBoard(tempfile.mkdtemp())
    loss, _ = network().evaluate(X, Y, verbose=0, callbacks=[callback])
    found = scalars(only_file(Path(callback.log_dir, "validation")))
    assert found["evaluation_loss_vs_iterations"] == [(0, pytest.approx(loss))]


def case_learning_rate_of_an_optimizer_with_a_loss_scale():
    model = network(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.125)))
    directory, _ = written(TensorBoard(write_graph=False), model)
    assert scalars(only_file(directory / "train"))["epoch_learning_rate"] == steps_of([0.125, 0.125])


def case_invalid_arguments_are_errors():
    for arguments in ({"update_freq": "often"}, {"update_freq": 0}, {"histogram_freq": -1}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            TensorBoard(**arguments)


def case_it_replaces_the_callback_of_keras():
    given = keras.callbacks.TensorBoard("there", histogram_freq=2, write_graph=False, update_freq="batch")
    callback = stand_in_for(given)
    assert type(callback) is TensorBoard
    kept = (callback.log_dir, callback.histogram_freq, callback.write_graph, callback.update_freq)
    assert kept == ("there", 2, False, 1)
    assert stand_in_for(callback) is callback
    with pytest.raises(ConfigError, match=r"write_images=…\) needs TensorFlow"):
        stand_in_for(keras.callbacks.TensorBoard(write_images=True))


def case_without_tensorboardx_the_error_says_what_to_install():
    kept = sys.modules["tensorboardX"]
    sys.modules["tensorboardX"] = None
    try:
        with pytest.raises(ImportError, match=r"pip install 'choros\[tensorboard\]'"):
            TensorBoard()
    finally:
        sys.modules["tensorboardX"] = kept


def case_the_callback_of_keras_in_the_fit_of_a_strategy():
    from choros import distribute

    with tempfile.TemporaryDirectory() as directory:
        with distribute.MirroredStrategy().scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        x = np.ones((8, 4), "float32")
        history = model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[keras.callbacks.TensorBoard(directory)])
        (file,) = Path(directory, "train").iterdir()
        losses = [value for _, value in scalars(file)["epoch_loss"]]
        np.testing.assert_allclose(losses, history.history["loss"], rtol=1e-6)
