"""Files of a strategy's models, written by functions of Keras and TensorFlow that all processes call."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

import choros
from choros import distribute
from choros.errors import StrategyError
from choros.observe import events
from choros.observe.events import Kind
from choros.parallel.objects import allgather_object, broadcast_object

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")


@keras.saving.register_keras_serializable("saving_cases")
class Watched(keras.layers.Dense):
    """Counts how often this process has serialised it."""

    serialised = 0
    fails = False

    def get_config(self):
        Watched.serialised += 1
        return super().get_config()

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.fails:
            raise OSError("disk full")


@keras.saving.register_keras_serializable("saving_cases")
class Observed(keras.layers.Dense):
    """Calls ``observe`` while it is being written."""

    observe = staticmethod(lambda: None)

    def get_config(self):  # for the .h5 format
        Observed.observe()
        return super().get_config()

    def save_own_variables(self, store):
        super().save_own_variables(store)
        Observed.observe()


def observed(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[bytes]:
    """Returns a list of what is in ``path`` while a file is being written, on the process that writes."""
    contents: list[bytes] = []
    monkeypatch.setattr(Observed, "observe", staticmethod(lambda: contents.append(path.read_bytes())))
    return contents


def build_observed() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), Observed(2)])
    model.compile("sgd", "mse")
    return model


def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), Watched(2)])
    model.compile("sgd", keras.losses.MeanSquaredError())
    return model


def directory() -> Path:
    """Returns an empty directory, the same for all processes."""
    return Path(broadcast_object(tempfile.mkdtemp() if choros.rank() == 0 else None))


def events_of(call) -> list:
    """Returns the events that ``call`` emits."""
    seen = []
    stop = events.listen(seen.append)
    call()
    stop()
    return seen


def writers(write) -> list[bool]:
    """Returns, for each process, whether it serialises a model in ``write``."""
    before = Watched.serialised
    write()
    return allgather_object(Watched.serialised > before)


def case_the_first_process_is_said_to_write():
    extended = strategy().extended
    assert extended.should_checkpoint == extended.should_save_summary == (choros.rank() == 0)
    assert not extended.experimental_require_static_shapes


def case_a_file_is_complete_while_it_is_written_again(monkeypatch):
    path = directory()
    with strategy().scope():
        model = build_observed()
    for name, save in (
        ("model.keras", model.save),
        ("model.weights.h5", model.save_weights),
        ("model.h5", lambda file: model.save(file, include_optimizer=False)),
    ):
        monkeypatch.setattr(Observed, "observe", staticmethod(lambda: None))
        save(path / name)
        first = (path / name).read_bytes()
        contents = observed(monkeypatch, path / name)
        model.layers[0].kernel.assign(model.layers[0].kernel + 1.0)
        save(path / name)
        assert set(contents) == ({first} if choros.rank() == 0 else set())
        second = (path / name).read_bytes()
        assert second != first

        def fail():
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Observed, "observe", staticmethod(fail))
        with pytest.raises(OSError if choros.rank() == 0 else StrategyError, match="No space left"):
            save(path / name)
        assert (path / name).read_bytes() == second
    assert sorted(file.name for file in path.iterdir()) == ["model.h5", "model.keras", "model.weights.h5"]


def tree(path: Path) -> dict[str, bytes]:
    """Returns the files below ``path``."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def case_weights_in_several_files_are_complete_while_they_are_written_again(monkeypatch):
    path = directory()
    with strategy().scope():
        model = build_observed()
    for name in ("a.weights.json", "b.weights.json"):  # the second is not there yet
        if name[0] == "a":
            model.save_weights(path / name, max_shard_size=2.5e-8)
        first, seen = tree(path), []
        monkeypatch.setattr(Observed, "observe", staticmethod(lambda seen=seen: seen.append(tree_of_finished(path))))
        model.layers[0].kernel.assign(model.layers[0].kernel + 1.0)
        model.save_weights(path / name, max_shard_size=2.5e-8)
        assert seen == ([first] if choros.rank() == 0 else [])
        monkeypatch.setattr(Observed, "observe", staticmethod(lambda: None))
    kernel = keras.ops.convert_to_numpy(model.layers[0].kernel)
    model.load_weights(path / "a.weights.json")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model.layers[0].kernel), kernel - 1.0, rtol=1e-6)
    model.load_weights(path / "b.weights.json")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model.layers[0].kernel), kernel, rtol=1e-6)
    assert len(list(path.glob("[ab]_0*.weights.h5"))) >= 4
    assert not list(path.glob(".unfinished*"))


def tree_of_finished(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(path).items() if not name.startswith(".unfinished")}


def case_directories_are_complete_while_they_are_written_again(monkeypatch):
    path = directory() / "model"
    with strategy().scope():
        model = build_observed()
    keras.saving.save_model(model, path, zipped=False)
    first, seen = tree(path), []
    monkeypatch.setattr(Observed, "observe", staticmethod(lambda: seen.append(tree(path))))
    model.layers[0].kernel.assign(model.layers[0].kernel + 1.0)
    keras.saving.save_model(model, path, zipped=False)
    assert all(each == first for each in seen)
    assert bool(seen) == (choros.rank() == 0)
    monkeypatch.setattr(Observed, "observe", staticmethod(lambda: None))
    assert tree(path).keys() == first.keys()
    assert tree(path) != first
    assert not list(path.parent.glob(".unfinished*"))


def case_other_formats_are_complete_while_they_are_exported_again(monkeypatch):
    """ONNX may put weights in a file beside its own, and refers to it by its name."""
    from keras.src import export
    from keras.src.utils import io_utils

    path, messages, seen = directory() / "model.onnx", [], []

    def export_onnx(model, filepath, verbose=None, **_):
        seen.append(tree_of_finished(path.parent))
        Path(f"{filepath}.data").write_text(f"weights {len(seen)}")
        Path(filepath).write_text(f"graph {len(seen)}, weights in {Path(filepath).name}.data")
        io_utils.print_msg(f"Saved artifact at '{filepath}'.")

    monkeypatch.setattr(export, "export_onnx", export_onnx)
    monkeypatch.setattr(io_utils, "print_msg", messages.append)
    with strategy().scope():
        model = build()
    for number in (1, 2):
        before = tree_of_finished(path.parent)
        allgather_object("read")
        model.export(path, format="onnx")
        assert seen[number - 1 :] == ([before] if choros.rank() == 0 else [])
        assert path.read_text() == f"graph {number}, weights in model.onnx.data"
    assert (path.parent / "model.onnx.data").read_text() == "weights 2"
    assert messages == ([f"Saved artifact at '{path}'."] * 2 if choros.rank() == 0 else [])
    assert len(list(path.parent.iterdir())) == 2


def case_callbacks_leave_complete_files(monkeypatch):
    path = directory()
    with strategy().scope():
        model = build_observed()
    backups = keras.callbacks.BackupAndRestore(path / "backup", delete_checkpoint=False)
    best = keras.callbacks.ModelCheckpoint(path / "model.keras")
    model.fit(X, X[:, :2], batch_size=4, epochs=1, verbose=0, callbacks=[best, backups])
    files = sorted(file for file in path.rglob("*.*") if file.is_file())
    assert [file.name for file in files] == ["latest.weights.h5", "training_metadata.json", "model.keras"]
    observations: list[int] = []

    def check():  # raises if a file is not complete
        h5py.File(files[0]).close()
        assert json.loads(files[1].read_text())["epoch"] in (1, 2)
        assert zipfile.ZipFile(files[2]).testzip() is None
        observations.append(1)

    monkeypatch.setattr(Observed, "observe", staticmethod(check))
    model.fit(X, X[:, :2], batch_size=4, epochs=2, initial_epoch=1, verbose=0, callbacks=[best, backups])
    assert bool(observations) == (choros.rank() == 0)
    assert json.loads((path / "backup" / "training_metadata.json").read_text())["epoch"] == 2
    assert not list(path.rglob(".unfinished*"))


def case_callbacks_of_all_processes_create_one_directory(monkeypatch):
    from keras.src.utils import file_utils

    folder, own = directory() / "new", file_utils.exists
    # Each process looks before another one has created it.
    monkeypatch.setattr(file_utils, "exists", lambda path: str(path) != str(folder) and own(path))
    with strategy().scope():
        model = build()
    checkpoint = keras.callbacks.ModelCheckpoint(folder / "model.keras")
    model.fit(X, X[:, :2], batch_size=4, verbose=0, callbacks=[checkpoint])
    choros.global_process_set.communicator.barrier()
    assert (folder / "model.keras").exists()


def case_functions_of_keras_write_on_one_process():
    path = directory()
    with strategy().scope():
        model = build()
    saves = [
        lambda: keras.saving.save_model(model, path / "function.keras"),
        lambda: keras.models.save_model(model, str(path / "alias.keras")),
        lambda: model.save(path / "method.keras"),
        lambda: model.save(path / "legacy.h5"),
    ]
    for save in saves:
        assert writers(save) == [True, False]
    for file in path.iterdir():
        loaded = keras.models.load_model(file)
        np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)


def case_processes_write_files_of_their_own_to_different_paths():
    path = directory()
    with strategy().scope():
        model = build()
    own = path / f"{choros.rank()}.weights.h5"
    assert writers(lambda: keras.saving.save_model(model, own.with_suffix(".keras"))) == [True, True]
    model.save_weights(own)
    assert len(list(path.iterdir())) == 4
    model.load_weights(own)


def case_a_model_of_one_process_is_its_own():
    model = build()
    path = directory() / "model.keras"
    if choros.rank() == 0:
        keras.saving.save_model(model, path)  # waits for no other process
    strategy().replicas.gather(np.zeros(1), 0)
    keras.saving.load_model(path)


def case_files_are_complete_at_any_time():
    """Processes that save models of their own to one path read whole files; so does who reads after a failed write."""
    path = directory()
    with strategy().scope():
        pass
    model = build()
    for name in ("model.keras", "model.weights.h5"):
        save = model.save if name == "model.keras" else model.save_weights
        load = keras.saving.load_model if name == "model.keras" else model.load_weights
        for _ in range(5):
            save(path / name)
            load(path / name)
    model.layers[0].fails = True
    with pytest.raises(OSError, match="disk full"):
        model.save(path / "model.keras")
    allgather_object("both have failed")
    assert sorted(file.name for file in path.iterdir()) == ["model.keras", "model.weights.h5"]
    keras.saving.load_model(path / "model.keras")


def case_a_write_error_of_any_process_is_raised_on_all():
    with strategy().scope():
        model = build()
    path = directory() / ("missing" if choros.rank() == 1 else "") / "model.keras"
    with pytest.raises((StrategyError, OSError, ValueError)) as caught:
        keras.saving.save_model(model, path)
    assert (choros.rank() == 1) != ("process 1, which writes" in str(caught.value))


def case_saved_models_of_tensorflow():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    path = directory()
    with strategy().scope():
        model = build()
    expected = model(X).numpy()
    for number in range(3):
        tf.saved_model.save(model, str(path / f"{number}"))
        loaded = tf.saved_model.load(str(path / f"{number}"))
        np.testing.assert_allclose(
            next(iter(loaded.signatures["serving_default"](tf.constant(X)).values())), expected, rtol=1e-5
        )


def case_saved_models_are_complete_while_they_are_written_again(monkeypatch):
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf
    from tensorflow.python.saved_model import builder_impl

    path = directory() / "model"
    with strategy().scope():
        model = build()
    own, seen = builder_impl.copy_assets_to_destination_dir, []

    def observe(*args, **kwargs):  # the variables are written, the graph is not
        seen.append(tree(path))
        return own(*args, **kwargs)

    monkeypatch.setattr(builder_impl, "copy_assets_to_destination_dir", observe)
    for save in (lambda: tf.saved_model.save(model, str(path)), lambda: model.export(path, verbose=False)):
        save()
        first = tree(path)
        seen.clear()
        model.layers[0].kernel.assign(model.layers[0].kernel + 1.0)
        save()
        assert seen == ([first] if choros.rank() == 0 else [])
        assert tree(path) != first
    if choros.rank() == 0:
        (path / "mine.txt").write_text("mine")
    allgather_object("a file of the user's is there")
    tf.saved_model.save(model, str(path))  # in place
    assert (path / "mine.txt").read_text() == "mine"
    assert not list(path.parent.glob(".unfinished*"))


def case_checkpoints_made_outside_of_the_scope():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    class Counter(tf.train.experimental.PythonState):
        written = 0

        def serialize(self):
            self.written += 1
            return ""

        def deserialize(self, value):
            pass

    path, counter = directory(), Counter()
    with strategy().scope():
        model = build()
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, counter=counter)
    manager = tf.train.CheckpointManager(checkpoint, path / "managed", 2, step_counter=step, checkpoint_interval=2)
    saved = [(manager.save(), step.assign_add(1))[0] for _ in range(5)]
    assert [name and Path(name).name for name in saved] == ["ckpt-1", None, "ckpt-2", None, "ckpt-3"]
    assert allgather_object(counter.written > 0) == [True, False]
    assert manager.latest_checkpoint == saved[-1] == tf.train.latest_checkpoint(path / "managed")
    assert manager.checkpoints == [saved[2], saved[4]]
    for _ in range(2):
        last = checkpoint.save(str(path / "plain"))
    checkpoint.write(str(path / "written"))
    assert int(checkpoint.save_counter) == 5
    assert Path(last).name == "plain-5"
    assert Path(path, "written.index").exists()
    checkpoint.restore(last).assert_consumed()
    own = tf.train.CheckpointManager(checkpoint, path / f"{choros.rank()}", 1)
    assert Path(own.save()).parent.name == f"{choros.rank()}"
    assert counter.written > 0


def case_checkpoints_and_saved_models_of_tensorflows_modules():
    """What is marked are the variables that were created in the scope."""
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    class Layer(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable([2.0])

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.layers = [Layer()]

        @tf.function(input_signature=[tf.TensorSpec((), "float32")])
        def __call__(self, x):
            return x * self.layers[0].weight

    path, here, how = directory(), strategy(), tf.VariableAggregation
    with here.scope():
        model = Model()
        rows = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=how.SUM)
    assert here.extended.variable_created_in_scope(rows)
    assert not here.extended.variable_created_in_scope(tf.Variable(3))
    rows.assign(3)
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(rows=rows), path / "managed", 2)
    for save in (
        lambda: checkpoint.save(str(path / "plain")),
        manager.save,
        lambda: tf.saved_model.save(model, str(path / "saved")),
    ):
        files = [event for event in events_of(save) if event.kind == Kind.CHECKPOINT]
        assert allgather_object(len(files)) == [1, 0]
    assert float(tf.saved_model.load(str(path / "saved"))(3.0)[0]) == 6.0
    model.layers[0].weight.assign([5.0])
    checkpoint.restore(str(path / "plain-1")).assert_consumed()
    assert float(model.layers[0].weight[0]) == 2.0
    assert manager.latest_checkpoint == str(path / "managed" / "ckpt-1")
    rows.assign(0)
    manager.restore_or_initialize()
    assert int(rows.numpy()) == 3  # the replicas' sum
