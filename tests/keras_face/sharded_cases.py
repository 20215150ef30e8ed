"""A Keras optimizer of which each rank has a slice of the state: the same weights, and files of one process.

Run by ``test_sharded.py`` on 2 and 3 ranks of each framework. Optimizers are compared with themselves unsharded, bit
for bit where they work item by item, and with plain Keras given the mean gradient; models with plain Keras on all rows.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.comm.members import KEPT_STEPS
from choros.errors import ConfigError
from choros.parallel.reduce.slices import gather_slices
from choros.training import sliced_state
from choros.training.distributed_optimizer import reducer_of
from choros.training.sliced_state import works_by_item
from ranks.reference import of_one_rank

BACKEND = keras.backend.backend()
#: Sizes that no number of ranks divides; some variables are smaller than what is not cut.
SHAPES = [(7, 33), (33,), (33, 17), (17,), (17, 1), (1,)]
#: ``python -m pytest`` with CHOROS_TEST_STEPS=20 makes more.
STEPS = int(os.environ.get("CHOROS_TEST_STEPS", "6"))

CREATE: dict[str, Callable[..., Any]] = {
    "sgd": lambda **given: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True, **given),
    "adam": lambda **given: keras.optimizers.Adam(0.01, amsgrad=True, **given),
    "adamw": lambda **given: keras.optimizers.AdamW(0.01, **{"weight_decay": 0.05, **given}),
    "adamax": lambda **given: keras.optimizers.Adamax(0.01, **given),
    "nadam": lambda **given: keras.optimizers.Nadam(0.01, **given),
    "rmsprop": lambda **given: keras.optimizers.RMSprop(0.003, momentum=0.5, centered=True, **given),
    "adagrad": lambda **given: keras.optimizers.Adagrad(0.05, **given),
    "adadelta": lambda **given: keras.optimizers.Adadelta(0.5, **given),
    "ftrl": lambda **given: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001, **given),
    "lion": lambda **given: keras.optimizers.Lion(0.003, **given),
    "muon": lambda **given: keras.optimizers.Muon(0.01, exclude_layers=["last"], **given),
    "adafactor": lambda **given: keras.optimizers.Adafactor(0.01, **given),
    "lamb": lambda **given: keras.optimizers.Lamb(0.01, **given),
}
#: Clipping by norms sums squares in another order.
BY_NORMS: list[dict[str, Any]] = [{"clipnorm": 0.9}, {"global_clipnorm": 1.5, "use_ema": True, "ema_momentum": 0.8}]
BY_ITEM: list[dict[str, Any]] = [
    {},
    {"clipvalue": 0.8, "weight_decay": 0.01},
    {"gradient_accumulation_steps": 2},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
]


def variables() -> list[Any]:
    generator = np.random.default_rng(1)
    names = ["table", "bias", "kernel", "bias", "last", "last"]
    return [
        keras.Variable(generator.normal(size=shape).astype("float32"), name=name)
        for shape, name in zip(SHAPES, names, strict=True)
    ]


def gradients(step: int, rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng((step, rank))
    return [generator.normal(size=shape).astype("float32") for shape in SHAPES]


def applied(optimizer: Any, of_step: Callable[[int], list[np.ndarray]]) -> list[np.ndarray]:
    """The variables after some steps, and at the end of training, when moving averages take their place."""
    trained = variables()
    optimizer.build(trained)
    apply = _compiled(optimizer, trained) if BACKEND == "jax" else optimizer.apply
    for step in range(STEPS):
        apply([keras.ops.convert_to_tensor(gradient) for gradient in of_step(step)], trained)
    now = [host(variable) for variable in trained]
    optimizer.finalize_variable_values(trained)
    return now + [host(variable) for variable in trained]


def _compiled(optimizer: Any, trained: list[Any]) -> Callable[..., None]:
    """``apply`` as Keras' trainer on JAX calls it."""
    import jax

    step = jax.jit(optimizer.stateless_apply)

    def apply(gradients: list[Any], _: list[Any]) -> None:
        state = [variable.value for variable in optimizer.variables]
        values, state = step(state, gradients, [variable.value for variable in trained])
        for variable, value in zip([*trained, *optimizer.variables], [*values, *state], strict=True):
            variable.assign(value)

    return apply


def host(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))


def check(create: Callable[..., Any], given: dict[str, Any], *, exactly: bool) -> None:
    def own(step: int) -> list[np.ndarray]:
        return gradients(step, hvd.rank())

    def mean(step: int) -> list[np.ndarray]:
        return [np.mean(each, 0) for each in zip(*(gradients(step, rank) for rank in range(hvd.size())), strict=True)]

    optimizer = hvd.DistributedOptimizer(create(**given), shard_state=True)
    sharded = applied(optimizer, own)
    unsharded = applied(hvd.DistributedOptimizer(create(**given)), own)
    for ours, theirs in zip(sharded, unsharded, strict=True):
        if exactly:
            np.testing.assert_array_equal(ours, theirs, err_msg=str(given))
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6, err_msg=str(given))
    for ours, theirs in zip(sharded, of_one_rank(lambda: applied(create(**given), mean)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=str(given))


@pytest.mark.parametrize("name", CREATE)
def case_optimizer(name: str) -> None:
    by_item = name not in ("muon", "adafactor", "lamb")
    for given in BY_ITEM:
        check(CREATE[name], given, exactly=by_item)
    for given in BY_NORMS:
        check(CREATE[name], given, exactly=False)


# models ---------------------------------------------------------------------------------------------

ROWS, FEATURES, BATCH = 65, 7, 16  # the last batch has one row: other ranks have none
EPOCHS = 3


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype("float32")
    return x, (x**2).sum(1, keepdims=True)


def build(constraint: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(33, activation="tanh"),
            keras.layers.Dense(17, activation="tanh", kernel_constraint=constraint),
            keras.layers.Dense(1),
        ]
    )


def fit(model: keras.Model, optimizer: Any, *more: Any, epochs: int = EPOCHS, first: int = 0) -> keras.Model:
    """Trains a model on this rank's rows, or with a plain optimizer on all."""
    if optimizer is not None:
        model.compile(optimizer, "mse")
    options: dict[str, Any] = {"epochs": epochs, "initial_epoch": first, "shuffle": False, "verbose": 0}
    if is_distributed(model.optimizer):
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *more]
        model.fit(hvd.shard(data(), batch_size=BATCH), callbacks=callbacks, **options)
    else:
        model.fit(*data(), batch_size=BATCH, callbacks=list(more), **options)
    return model


def is_distributed(optimizer: Any) -> bool:
    return reducer_of(optimizer) is not None


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray], bound: float = 1e-4) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound / 10)


def check_fit(create: Callable[[], Any], bound: float = 1e-4, make: Callable[[], Any] = build, **given: Any) -> Any:
    """Trains in slices and alone; returns the model that has slices."""
    model = fit(make(), hvd.DistributedOptimizer(create(), shard_state=True, **given))
    alone = of_one_rank(lambda: fit(make(), create()).get_weights())
    assert_close(model.get_weights(), alone, bound)
    return model


def case_fit_with_a_last_batch_of_one_row() -> None:
    check_fit(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))


def case_large_weights_are_received_where_they_are_to_be() -> None:
    """Those of 256 KiB and more, of which one is cut; in every bit what they are without slices, unless XLA rounds."""
    x, y = data()

    def weights(shard_state: bool) -> list[Any]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(units, activation="tanh") for units in (9000, 33, 5)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=shard_state), "mse")
        shards = hvd.shard((x, y), batch_size=BATCH)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        model.fit(shards, shuffle=False, verbose=0, callbacks=callbacks)
        return list(model.get_weights())

    for own, alone in zip(weights(True), weights(False), strict=True):
        np.testing.assert_allclose(own, alone, rtol=0, atol=1e-7 if keras.backend.backend() == "jax" else 0)


def case_training_goes_on_after_shutdown_and_init() -> None:
    """A step that was compiled before exchanges slices with the ranks of now."""

    def create() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.5), shard_state=True)

    trained, alone = fit(build(), create(), epochs=1), fit(build(), create(), epochs=2)
    hvd.shutdown()
    hvd.init()
    assert_close(fit(trained, None, epochs=2, first=1).get_weights(), alone.get_weights())


def case_bytes_of_a_rank() -> None:
    """Within one percent of its part, of one large variable and of many that are whole on a rank."""
    shapes = [(150, 701), (701,), *[(33, 7)] * 40, *[(5,)] * 40]
    trained = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    total = 2 * sum(host(variable).nbytes for variable in trained)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True)
    optimizer.build(trained)
    own = sum(host(variable).nbytes for variable in optimizer.variables)
    assert abs(own / (total / hvd.size()) - 1) < 0.01, (own, total)


def case_ranks_that_start_from_different_weights() -> None:
    """Slices would mix them, and no later comparison tell."""
    model = build()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True), "mse")
    model.layers[1].bias.assign(np.full(17, float(hvd.rank()), "float32"))
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    with pytest.raises(Exception, match="before step 1, ranks have different values of 1 of 6 variables"):
        model.fit(hvd.shard(data(), batch_size=BATCH), shuffle=False, verbose=0, callbacks=callbacks)


def case_a_second_model_that_starts_from_different_weights() -> None:
    """Of one optimizer for both, which train in turn."""
    one, other = variables(), variables()
    other[1].assign(np.full(33, float(hvd.rank()), "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
    optimizer.build(one + other)
    own = [keras.ops.convert_to_tensor(each) for each in gradients(0, hvd.rank())]
    optimizer.apply(own, one)
    with pytest.raises(Exception, match="before step 1, ranks have different values of 1 of 6 variables"):
        optimizer.apply(own, other)


def case_a_learning_rate_that_differs() -> None:
    """Weights are the same: each rank gives the others its items."""
    model = build()
    rate = 0.01 * (1 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(rate), shard_state=True), "mse")
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    with pytest.raises(Exception, match=r"after step 2, ranks have different values of 1 of 7 variables, .*learning_"):
        model.fit(hvd.shard(data(), batch_size=BATCH), shuffle=False, verbose=0, callbacks=callbacks)


def case_constraints_are_of_whole_weights() -> None:
    check_fit(lambda: keras.optimizers.SGD(0.05), make=lambda: build(keras.constraints.MaxNorm(0.7)))


def case_accumulated_gradients() -> None:
    check_fit(lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


def case_backward_passes_per_step() -> None:
    given = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    model = fit(build(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True, **given))
    whole = fit(build(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **given))
    assert_close(model.get_weights(), whole.get_weights(), 1e-6)


def case_weights_are_gathered_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []

    def counted(*given: Any, **named: Any) -> Any:
        gathered.append(given)
        return gather_slices(*given, **named)

    monkeypatch.setattr(sliced_state, "gather_slices", counted)
    for count, given in ((2, {}), (8, {"use_ema": True, "ema_overwrite_frequency": 3})):
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, **given)
        alone = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, **given)
        optimizer, weights = hvd.DistributedOptimizer(optimizer, shard_state=True), []
        for each, ranks in ((optimizer, [hvd.rank()]), (alone, range(hvd.size()))):
            trained = variables()
            each.build(trained)
            apply = _compiled(each, trained) if BACKEND == "jax" else each.apply
            for step in range(8):
                means = zip(*(gradients(step, rank) for rank in ranks), strict=True)
                apply([keras.ops.convert_to_tensor(np.mean(mean, 0)) for mean in means], trained)
            weights.append(list(map(host, trained)))
        assert_close(*weights)
        assert len(gathered) == count
        gathered.clear()


def case_moving_averages_take_their_place_at_the_end() -> None:
    check_fit(lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.7, clipnorm=0.3))


def case_moving_averages_take_their_place_in_each_validation() -> None:
    """And, with ``swap_on_epoch``, in what is saved at the end of each epoch."""
    for swap_on_epoch in (False, True):

        def trained(distribute: bool, swap_on_epoch: bool = swap_on_epoch) -> list[Any]:
            seen: list[Any] = []
            averages = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
            saved = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.extend(model.get_weights()))
            own = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.7)
            model = build()
            model.compile(hvd.DistributedOptimizer(own, shard_state=True) if distribute else own, "mse")
            settings: dict[str, Any] = {"epochs": 3, "shuffle": False, "verbose": 0, "validation_data": data()}
            if distribute:
                callbacks = [hvd.callbacks.MetricAverageCallback(), averages, saved]
                history = model.fit(hvd.shard(data(), batch_size=BATCH), callbacks=callbacks, **settings)
            else:
                history = model.fit(*data(), batch_size=BATCH, callbacks=[averages, saved], **settings)
            return [*map(np.float32, history.history["val_loss"]), *seen, *model.get_weights()]

        ours = trained(distribute=True)
        assert_close(ours, of_one_rank(lambda: trained(distribute=False)), 1e-5)


def case_loss_scaling() -> None:
    for kind in (keras.optimizers.Adam, keras.optimizers.Adafactor):  # within another optimizer, it has fewer variables

        def create(kind: Any = kind) -> Any:
            inner = kind(0.01, clipnorm=0.4)
            return keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0, dynamic_growth_steps=3)

        model = check_fit(create)
        assert float(model.optimizer.dynamic_scale.numpy()) > 256.0


def case_compression() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.int8):
        given = {"compression": compression}
        model = fit(build(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True, **given))
        whole = fit(build(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **given))
        assert_close(model.get_weights(), whole.get_weights(), 2e-2 if compression is hvd.Compression.int8 else 5e-3)


def case_few_trained_weights_of_many() -> None:
    def lora() -> keras.Model:
        model = build()
        model.layers[0].trainable = False
        model.layers[1].enable_lora(2)
        return model

    model = check_fit(lambda: keras.optimizers.Adam(0.01), make=lora)
    assert sum(host(each).nbytes for each in model.optimizer.variables) < model.count_params() * 4


def case_rows_of_an_embedding() -> None:
    """On TensorFlow gradients are rows, some of them twice; an embedding is cut between rows."""

    def embedding(table: Callable[..., Any] = keras.layers.Embedding) -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x * 9), "int32")),
        ]
        layers += [table(37, 5), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    check_fit(lambda: keras.optimizers.Adam(0.01, clipnorm=0.2), make=embedding)
    check_fit(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.2), make=embedding)  # Keras makes rows dense
    of_ones_own = functools.partial(embedding, Table)
    if BACKEND == "tensorflow":
        with pytest.raises(ConfigError, match="pass sparse_as_dense=True"):
            fit(of_ones_own(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True))
    one, other = (
        fit(
            of_ones_own(),
            hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=shard_state, sparse_as_dense=True),
        ).get_weights()
        for shard_state in (True, False)
    )
    assert_close(one, other)  # dense, Adam also changes the rows that a batch lacks


class Table(keras.layers.Layer):  # type: ignore[misc]
    """An embedding that choros does not know to be one."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = self.add_weight(shape=(rows, width), name="table")

    def call(self, indices: Any) -> Any:
        return keras.ops.take(self.weight, keras.ops.cast(indices, "int32"), axis=0)


def case_an_optimizer_that_was_built_before() -> None:
    """What its config lacks stays: which variables do not decay, and a function for the learning rate."""

    def train(shard_state: bool) -> list[np.ndarray]:
        trained = variables()
        optimizer = keras.optimizers.AdamW(lambda: 0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build(trained)
        if shard_state:
            optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
        for step in range(3):
            optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients(step, 0)], trained)
        return [host(each) for each in trained]

    for one, other in zip(train(True), train(False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def case_what_keras_checks() -> None:
    class DecaysMatrices(keras.optimizers.AdamW):  # type: ignore[misc]
        def _use_weight_decay(self, variable: Any) -> bool:
            return len(variable.shape) > 1

    assert not works_by_item(DecaysMatrices())
    trained = variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
    optimizer.build(trained)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None] * len(trained), trained)
    other = keras.Variable(np.zeros(3, "float32"), name="other")
    with pytest.raises(ConfigError, match="other is none of the 6 variables"):
        optimizer.apply([keras.ops.ones(3)], [other])
    with pytest.raises(ConfigError, match="cannot become a variable of each rank's own"):
        optimizer.register_local_var(trained[0])


def case_clipped_gradients_of_another_dtype() -> None:
    for given in ({"clipnorm": 0.1}, {"global_clipnorm": 0.1}):
        trained = [keras.Variable(np.ones((9, 9)), dtype="bfloat16", name=name) for name in "ab"]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, **given), shard_state=True)
        optimizer.apply([keras.ops.ones((9, 9), "bfloat16")] * 2, trained)
        moved = np.asarray(1 - keras.ops.convert_to_numpy(keras.ops.cast(trained[0].value, "float32")))
        norm = np.linalg.norm(moved) * (2**0.5 if "global_clipnorm" in given else 1)
        np.testing.assert_allclose(norm, 0.1, rtol=0.3)


def case_dropped_optimizers_are_freed() -> None:
    def train(steps: int) -> weakref.ref[Any]:
        trained = variables()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True)
        for step in range(steps):
            optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients(step, 0)], trained)
        return weakref.ref(trained[0])

    variable = train(1)
    gc.collect()
    assert variable() is not None  # other ranks may ask for its state
    train(KEPT_STEPS)
    gc.collect()
    assert variable() is None


def case_a_process_set() -> None:
    if hvd.size() < 3:
        pytest.skip("a process set of fewer ranks than all has to have two")
    ranks = [0, 2]
    members = hvd.add_process_set(ranks)
    if hvd.rank() in ranks:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard_state=True, process_set=members)
        trained, expected, alone = variables(), variables(), keras.optimizers.Adam(0.01)
        for step in range(3):
            optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients(step, hvd.rank())], trained)
            means = zip(*(gradients(step, rank) for rank in ranks), strict=True)
            alone.apply([keras.ops.convert_to_tensor(np.mean(each, 0)) for each in means], expected)
        assert_close(list(map(host, trained)), list(map(host, expected)))
    hvd.remove_process_set(members)


# files ----------------------------------------------------------------------------------------------


class SavesOften(keras.callbacks.Callback):
    """Saves on one rank alone, in the middle of an epoch, as a user's callback may."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.save(self.path / "middle.keras")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.save(self.path / f"{epoch}.keras")


def shared_directory() -> Path:
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))


def case_one_rank_alone_saves_files_of_one_process() -> None:
    shared_path = shared_directory()

    def create() -> Any:
        return keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)

    more = [SavesOften(shared_path)] if hvd.rank() == 0 else []
    fit(build(), hvd.DistributedOptimizer(create(), shard_state=True), *more, epochs=2)
    if hvd.rank() == 0:
        for name, epochs in (("0.keras", 1), ("1.keras", 2)):
            saved = keras.saving.load_model(shared_path / name)
            alone = fit(build(), create(), epochs=epochs)
            ours, theirs = (list(map(host, each.optimizer.variables)) for each in (saved, alone))
            assert [each.shape for each in ours] == [each.shape for each in theirs]
            assert_close(ours, theirs)
        assert int(keras.saving.load_model(shared_path / "middle.keras").optimizer.iterations) == 2 + 5
    hvd.allreduce(0.0, name="files are read")


def case_training_goes_on_from_a_file() -> None:
    """In slices from a file of slices and of one process, and in one process from both."""
    shared_path = shared_directory()

    def create() -> Any:
        return keras.optimizers.Adam(0.01, clipnorm=0.5)

    first = fit(build(), hvd.DistributedOptimizer(create(), shard_state=True), epochs=1)
    if hvd.rank() == 0:
        first.save(shared_path / "slices.keras")
        fit(build(), create(), epochs=1).save(shared_path / "alone.keras")
    hvd.allreduce(0.0, name="files are written")
    alone = of_one_rank(lambda: fit(build(), create(), epochs=3).get_weights())
    for name in ("slices.keras", "alone.keras"):
        path = str(shared_path / name)
        model = fit(hvd.load_model(path, shard_state=True), None, epochs=3, first=1)
        assert_close(model.get_weights(), alone)
        again = of_one_rank(lambda path=path: fit(keras.saving.load_model(path), None, epochs=3, first=1).get_weights())
        assert_close(again, alone)
        compiled = build()
        compiled.compile(hvd.DistributedOptimizer(create(), shard_state=True), "mse")
        compiled.optimizer.build(compiled.trainable_variables)
        compiled.load_weights(path)
        assert_close(fit(compiled, None, epochs=3, first=1).get_weights(), alone)
