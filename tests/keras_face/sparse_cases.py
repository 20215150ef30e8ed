"""Embeddings on TensorFlow: their gradients stay sparse, and ranks end as plain Keras on the whole batches."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf

import choros.keras as hvd
from choros import distribute, nn
from choros.comm.joining import join
from choros.errors import ConfigError
from choros.settings import current
from choros.training.distributed_optimizer import participation, receive_weights
from keras_face.training_cases import assert_same_history, assert_same_on_all_ranks, assert_same_weights, communicator

WORDS, USERS, LENGTH, BATCH = 40, 20, 3, 16
#: Four batches, the last with 3 rows; with a last batch of one row, a rank has no rows.
UNEVEN, ONE_ROW = 51, 49

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
}


def data(n: int = UNEVEN):
    """Returns words and users, which occur several times in a batch, and labels."""
    draws = np.random.default_rng(0)
    words, users = draws.integers(0, WORDS, (n, LENGTH)), draws.integers(0, USERS, (n, 1))
    return {"words": words.astype("int32"), "users": users.astype("int32")}, draws.integers(0, 2, n).astype("float32")


def build(optimizer=None, *, same_start: bool = True, compiled: bool = False) -> keras.Model:
    """Two embeddings, of which one is used twice, and a dense layer."""
    keras.utils.set_random_seed(1 if same_start else 1 + hvd.rank())
    words, users = keras.Input((LENGTH,), dtype="int32", name="words"), keras.Input((1,), dtype="int32", name="users")
    embedding = keras.layers.Embedding(WORDS, 4)
    mean = keras.layers.GlobalAveragePooling1D()(embedding(words))
    first = keras.layers.Flatten()(embedding(words[:, :1]))
    user = keras.layers.Flatten()(keras.layers.Embedding(USERS, 2)(users))
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([mean, first, user]))
    model = keras.Model({"words": words, "users": users}, outputs)
    if optimizer is not None:
        # Eager steps are the quickest here: one case is compiled.
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), run_eagerly=not compiled)
    return model


def fit(model: keras.Model, *args, callbacks=(), **kwargs) -> dict[str, list[float]]:
    return model.fit(*args, epochs=1, shuffle=False, verbose=0, callbacks=list(callbacks), **kwargs).history


def plain(make, n: int = UNEVEN):
    model = build(make())
    return model, fit(model, *data(n), batch_size=BATCH)


def horovod(optimizer, n: int = UNEVEN, **kwargs):
    model = build(optimizer, same_start=False, **kwargs)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    return model, fit(model, hvd.shard(data(n), batch_size=BATCH), callbacks=callbacks)


def updates_of(optimizer) -> list:
    """Makes ``optimizer`` record the gradients of its updates."""
    received = []
    own = optimizer.update_step

    def update_step(gradient, variable, learning_rate):
        received.append(gradient)
        own(gradient, variable, learning_rate)

    object.__setattr__(optimizer, "update_step", update_step)
    return received


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in ("adam", "clipnorm")])
def case_uneven_batches(optimizer):
    check_fit(optimizer, UNEVEN)


@pytest.mark.parametrize("optimizer", ["adam", "clipnorm"])
def case_a_last_batch_of_one_row(optimizer):
    check_fit(optimizer, ONE_ROW)


def check_fit(optimizer, n):
    expected, theirs = plain(OPTIMIZERS[optimizer], n)
    model, ours = horovod(hvd.DistributedOptimizer(OPTIMIZERS[optimizer]()), n)
    assert_same_weights(model, expected)
    assert_same_on_all_ranks(model)
    assert_same_history(ours, theirs)


class TokenAndPosition(keras.layers.Layer):
    """As in Keras' examples: of positions one process has each row once, whatever its batch."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.tokens, self.positions = keras.layers.Embedding(WORDS, 4), keras.layers.Embedding(LENGTH, 4)
        self.constant = length

    def call(self, words):
        length = keras.ops.shape(words)[-1] if self.constant is None else self.constant
        return self.tokens(words) + self.positions(keras.ops.arange(0, length, 1))


@pytest.mark.parametrize("mode", ["a length that is known", "a length that is not", "eager", "slices"])
def case_embeddings_of_positions(mode):
    def build_positions(optimizer):
        keras.utils.set_random_seed(1)
        length = LENGTH if mode == "a length that is known" else None
        layers = [TokenAndPosition(length), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((length,), dtype="int32"), *layers])
        model.compile(optimizer, "mse", run_eagerly=mode == "eager")
        return model

    (inputs, labels), options = data(ONE_ROW), {"shard_state": True} if mode == "slices" else {}
    expected = build_positions(keras.optimizers.Adam(0.01))
    fit(expected, inputs["words"], labels, batch_size=BATCH)
    model = build_positions(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **options))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    fit(model, hvd.shard((inputs["words"], labels), batch_size=BATCH), callbacks=callbacks)
    assert_same_weights(model, expected)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def case_a_step_reads_only_the_rows_of_its_batch(policy):
    """Not all of the variable, as ``tf.gather`` of Keras' variables does by itself; the values are the same."""
    layer = keras.layers.Embedding(WORDS, 4, dtype=policy)
    layer.build()
    words = tf.constant(data(BATCH)[0]["words"])

    @tf.function
    def own(words):
        with tf.GradientTape() as tape:
            rows = layer(words)
        return rows, tape.gradient(rows, layer.embeddings.value)

    def whole(words):
        with tf.GradientTape() as tape:
            rows = tf.gather(tf.cast(tf.identity(layer.embeddings.value), layer.compute_dtype), words)
        return rows, tape.gradient(rows, layer.embeddings.value)

    pending = [tensor.op for tensor in own.get_concrete_function(words).outputs]
    operations: set[str] = set()  # those that compute the results
    while pending:
        operation = pending.pop()
        operations.add(operation.type)
        pending += [tensor.op for tensor in operation.inputs]
    assert "ResourceGather" in operations
    assert not operations & {"ReadVariableOp", "GatherV2"}
    (rows, gradient), (expected, theirs) = own(words), whole(words)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(gradient.indices, theirs.indices)
    np.testing.assert_array_equal(gradient.values, theirs.values)
    assert gradient.dtype == theirs.dtype == tf.float32


def case_compiled_steps_gather_rows():
    """A step sends the rows of its batch, all embeddings in one message, and not the variables."""
    expected, _ = plain(OPTIMIZERS["adam"])
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"]())
    received = updates_of(optimizer)
    model, _ = horovod(optimizer, compiled=True)
    assert_same_weights(model, expected)
    assert [type(gradient) for gradient in received[:4]].count(tf.IndexedSlices) == 2

    sent, batch = communicator().bytes_sent, hvd.shard(data(BATCH), batch_size=BATCH)
    gathered = []
    with patch.object(
        type(communicator()), "gather_bytes", autospec=True, side_effect=type(communicator()).gather_bytes
    ) as gather:
        model.train_on_batch(*batch[0])
        gathered += gather.call_args_list
    rows = BATCH // hvd.size()
    assert len(gathered) == 3  # the numbers of rows, their indices, and their values
    sparse = rows * (LENGTH + 1) * (4 + 4 * 4) + rows * (4 + 2 * 4)
    dense = 4 * (4 + 4 + 2 + 1)
    assert communicator().bytes_sent - sent == sparse + 2 * 16 + dense


def case_steps_read_embeddings_no_more_often_than_plain_ones():
    """TensorFlow copies a variable that is updated by rows whenever all of it is read."""

    def reads(optimizer) -> int:
        model = build()
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(inputs):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(inputs))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        operations = step.get_concrete_function(data(BATCH)[0]).graph.get_operations()
        return sum(each.type == "ReadVariableOp" and each.outputs[0].shape[:1] == [WORDS] for each in operations)

    assert reads(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())) == reads(OPTIMIZERS["sgd"]()) > 0


def case_micro_batches():
    make = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)  # noqa: E731
    expected, _ = plain(make, 64)
    model, _ = horovod(hvd.DistributedOptimizer(make()), 64)
    assert_same_weights(model, expected)
    assert_same_on_all_ranks(model)


class DenseAdam(keras.optimizers.Adam):
    """Makes gradients dense, so that a row that occurs twice is one row."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(gradient) for gradient in grads], trainable_variables)


def case_sparse_as_dense():
    expected, _ = plain(lambda: DenseAdam(0.01))
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](), sparse_as_dense=True)
    received = updates_of(optimizer)
    model, _ = horovod(optimizer)
    assert_same_weights(model, expected)
    assert not any(isinstance(gradient, tf.IndexedSlices) for gradient in received)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8])
def case_compression(compression):
    expected, _ = plain(OPTIMIZERS["sgd"])
    model, _ = horovod(hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), compression=compression))
    assert_same_weights(model, expected, rtol=2e-2)
    assert_same_on_all_ranks(model)


def case_buckets():
    with (
        patch("choros.settings._config", replace(current(), overlap=True)),
        patch("choros.parallel.reduce.plan._BUCKET_BYTES", 16),
    ):
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"]())
    model, _ = horovod(optimizer)
    assert_same_weights(model, plain(OPTIMIZERS["adam"])[0])


def case_local_embeddings_keep_their_own_gradient():
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"]())
    model = build(optimizer)
    (users,) = [layer for layer in model.layers if getattr(layer, "input_dim", None) == USERS]
    optimizer.register_local_var(users.embeddings)
    received = updates_of(optimizer)
    fit(model, hvd.shard(data(), batch_size=BATCH), callbacks=[hvd.callbacks.MetricAverageCallback()])
    own = hvd.allgather(users.embeddings.value[None])
    assert not np.allclose(own[0], own[1])
    assert sum(isinstance(gradient, tf.IndexedSlices) for gradient in received) == len(received) // 2


def case_ranks_with_different_numbers_of_batches():
    """Rank 1 has fewer batches: it joins with no rows."""
    x, y = data(40)
    ranges = ((0, 24), (24, 40))
    start, end = ranges[hvd.rank()]
    expected = build(OPTIMIZERS["adagrad"]())
    for step in range(3):
        parts = [slice(low + 8 * step, low + 8 * step + 8) for low, high in ranges if low + 8 * step < high]
        rows = np.concatenate([np.arange(40)[part] for part in parts])
        expected.train_on_batch({name: each[rows] for name, each in x.items()}, y[rows])
    model = build(hvd.DistributedOptimizer(OPTIMIZERS["adagrad"]()), same_start=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    own = slice(start, end)
    fit(model, {name: each[own] for name, each in x.items()}, y[own], batch_size=8, callbacks=callbacks)
    assert_same_weights(model, expected)
    assert_same_on_all_ranks(model)


def case_a_rank_without_any_batch():
    """Rank 1 joins before it has computed a gradient, so it does not know which ones are sparse."""
    x, y = data(BATCH)
    expected = build(OPTIMIZERS["adam"]())
    expected.train_on_batch(x, y)
    model = build(hvd.DistributedOptimizer(OPTIMIZERS["adam"]()))
    model.optimizer.build(model.trainable_variables)
    if hvd.rank() == 0:
        model.train_on_batch(x, y)
    join(communicator(), participation(model.optimizer))
    receive_weights(model.optimizer)
    assert_same_weights(model, expected)
    assert_same_on_all_ranks(model)


# ── strategies ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [distribute.MirroredStrategy, distribute.experimental.CentralStorageStrategy])
@pytest.mark.parametrize("n", [UNEVEN, ONE_ROW])
def case_fit_of_a_strategy(kind, n):
    expected, theirs = plain(OPTIMIZERS["adam"], n)
    with kind().scope():
        model = build(OPTIMIZERS["adam"]())
    ours = fit(model, *data(n), batch_size=BATCH)
    assert_same_weights(model, expected)
    assert_same_history(ours, theirs)


@pytest.mark.parametrize("optimizer", ["adam", "global_clipnorm"])
def case_custom_loop(optimizer):
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def step_of(model, optimizer):
        @tf.function
        def step(batch):
            inputs, labels = batch
            with tf.GradientTape() as tape:
                losses = loss_of(labels[:, None], model(inputs, training=True))
                loss = nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step

    here = distribute.MirroredStrategy()
    with here.scope():
        model, own = build(), OPTIMIZERS[optimizer]()
        own.build(model.trainable_variables)
    theirs, plain_optimizer = build(), OPTIMIZERS[optimizer]()
    plain_optimizer.build(theirs.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    ours, alone = step_of(model, own), step_of(theirs, plain_optimizer)
    for batch, whole in zip(here.experimental_distribute_dataset(batches), batches, strict=True):
        loss = here.reduce("SUM", here.run(ours, args=(batch,)), axis=None)
        np.testing.assert_allclose(float(loss), float(alone(whole)), rtol=1e-4)
    assert_same_weights(model, theirs)


# ── collectives ──────────────────────────────────────────────────────────────────────────────────────


def slices(dtype=tf.float32) -> tf.IndexedSlices:
    """Rank 0 has one row, rank 1 two."""
    rank = hvd.rank()
    values, shape = tf.fill((rank + 1, 2), tf.cast(rank + 2, dtype)), tf.constant([9, 2])
    return tf.IndexedSlices(values, tf.range(rank, 2 * rank + 1), shape)


def case_allreduce():
    compiled = tf.function(hvd.allreduce)
    for reduced in (hvd.allreduce(slices(), name="rows"), compiled(slices())):
        np.testing.assert_array_equal(reduced.indices, [0, 1, 2])
        np.testing.assert_array_equal(reduced.values[:, 0], [1.0, 1.5, 1.5])
        np.testing.assert_array_equal(reduced.dense_shape, [9, 2])
    total = hvd.allreduce(slices(), op=hvd.Sum, prescale_factor=2.0, compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(total.values[:, 1], [4.0, 6.0, 6.0])
    np.testing.assert_array_equal(hvd.allreduce(slices(tf.int32), op=hvd.Sum).values[:, 0], [2, 3, 3])
    unknown = hvd.allreduce(tf.IndexedSlices(slices().values, slices().indices))
    assert unknown.dense_shape is None
    np.testing.assert_array_equal(hvd.allreduce(slices(tf.int32)).values[:, 0], [1.0, 1.5, 1.5])
    with pytest.raises(ConfigError, match="IndexedSlices"):
        hvd.allreduce(slices(), op=hvd.Max)


def case_collectives_of_a_strategy():
    here = distribute.MirroredStrategy()

    def step():
        return distribute.get_replica_context().all_reduce("SUM", {"rows": slices(), "number": tf.ones(())})

    reduced = here.run(step)
    assert float(reduced["number"]) == 2.0
    for total in (reduced["rows"], here.reduce("SUM", here.run(slices), axis=None)):
        np.testing.assert_array_equal(total.indices, [0, 1, 2])
        np.testing.assert_array_equal(total.values[:, 0], [2.0, 3.0, 3.0])
    mean = here.reduce("MEAN", here.run(slices), axis=None)
    np.testing.assert_array_equal(mean.values[:, 0], [1.0, 1.5, 1.5])
    with pytest.raises(ConfigError, match="cannot be gathered"):
        here.gather(here.run(slices), axis=0)


# ── sparse tensors in data sets ──────────────────────────────────────────────────────────────────────


def sparse_batches(n: int) -> tf.data.Dataset:
    """Returns batches of sparse rows and labels."""
    draws = np.random.default_rng(0)
    rows = draws.integers(0, 3, (n, 5)).astype("float32") * draws.integers(0, 2, (n, 5))
    labels = draws.normal(size=(n, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(rows.astype("float32")), labels)).batch(BATCH)


@pytest.mark.parametrize("n", [UNEVEN, ONE_ROW])
def case_sparse_tensors_are_distributed(n):
    here = distribute.MirroredStrategy()
    for (rows, labels), (whole, _) in zip(
        here.experimental_distribute_dataset(sparse_batches(n)), sparse_batches(n), strict=True
    ):
        assert rows.shape[1] == 5
        assert len(labels) == rows.dense_shape[0]
        gathered = hvd.allgather(tf.sparse.to_dense(rows))
        np.testing.assert_array_equal(gathered, tf.sparse.to_dense(whole))


def case_fit_on_sparse_tensors():
    def made():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,), sparse=True), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
        return model

    with distribute.MirroredStrategy().scope():
        model = made()
    expected = made()
    ours, theirs = (fit(each, sparse_batches(UNEVEN)) for each in (model, expected))
    assert_same_weights(model, expected)
    assert_same_history(ours, theirs)


def case_processes_without_data_get_empty_sparse_batches():
    here = distribute.MirroredStrategy()
    steps = list(here.distribute_datasets_from_function(lambda _: sparse_batches(BATCH * (1 + hvd.rank()))))
    assert len(steps) == 2
    assert [int(rows.dense_shape[0]) for rows, _ in steps] == [BATCH, BATCH * hvd.rank()]
