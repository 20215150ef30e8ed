"""TensorFlow's own names in a strategy, on two ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import choros
from choros import distribute
from choros.errors import ConfigError, StrategyError
from choros.parallel.objects import allgather_object


def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def answers() -> tuple[bool, bool, int]:
    names = tf.distribute
    return names.has_strategy(), names.in_cross_replica_context(), names.get_strategy().num_replicas_in_sync


OUTSIDE = (False, False, 1)


def case_losses_are_of_the_global_batch():
    def losses(per_example):
        return tf.nn.compute_average_loss(per_example), tf.nn.scale_regularization_loss(3.0)

    here, compiled = strategy(), tf.function(losses)
    values = tf.constant([2.0, 4.0])
    outside = [1 * 3.0, 3.0]
    inside = [3.0 / 2, 1.5]
    np.testing.assert_allclose(compiled(values), outside)
    for function in (losses, compiled):
        np.testing.assert_allclose(here.run(function, args=(values,)), inside)
    step = tf.function(lambda x: here.run(losses, args=(x,)))
    np.testing.assert_allclose(step(values), inside)
    np.testing.assert_allclose(compiled(values), outside)


def case_contexts():
    here = strategy()

    def step():
        replica = tf.distribute.get_replica_context()
        total = replica.all_reduce(tf.distribute.ReduceOp.SUM, [tf.constant(choros.rank() + 1.0)])
        parts = replica.all_gather(tf.constant([choros.rank()]), axis=0)
        merged = replica.merge_call(lambda *_: answers())
        return answers(), replica.replica_id_in_sync_group, replica.num_replicas_in_sync, total, parts, merged

    assert answers() == OUTSIDE
    with here.scope():
        assert answers() == (True, True, 2)
        assert tf.distribute.get_strategy() is here
        assert tf.distribute.get_replica_context() is None
    in_replica, identifier, number, total, parts, merged = here.run(step)
    assert (in_replica, merged) == ((True, False, 2), (True, True, 2))
    assert (identifier, number) == (choros.rank(), 2)
    assert (float(total[0]), parts.numpy().tolist()) == (3.0, [0, 1])
    assert answers() == OUTSIDE


def case_keras_trains_as_outside():
    """Keras scales losses by TensorFlow's number of replicas, compiles without XLA under it, and reduces gradients."""
    seen = []

    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x):
            seen.append(answers())
            return self.dense(x)

    def train(model, x, y):
        return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]

    def build():
        model = Model()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = np.ones((7, 2), "float32"), np.arange(7.0, dtype="float32")[:, None]
    here = strategy()
    with here.scope():
        ours = build()
        inside = train(ours, x, y)
    assert set(seen) == {OUTSIDE}
    plain = build()
    np.testing.assert_allclose(inside, train(plain, x, y), rtol=1e-5)
    assert ours.jit_compile is False  # a choros callback's; and not tf.distribute's, on one process
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5)


def case_an_optimizer_applies_the_sum_once():
    here = strategy()
    with here.scope():
        variable = tf.keras.Variable(1.0)
        optimizer = tf.keras.optimizers.SGD(1.0)
        scaled = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=1.0)
        optimizer.build([variable])

    def step_of(optimizer):
        return tf.function(lambda: optimizer.apply_gradients([(tf.constant(1.0 + choros.rank()), variable)]))

    here.run(step_of(optimizer))
    here.run(step_of(scaled))
    assert float(variable) == 1.0 - 3.0 - 3.0


def case_gradients_that_the_step_has_reduced():
    here = strategy()
    with here.scope():
        variable = tf.keras.Variable(1.0)
        optimizer = tf.keras.optimizers.SGD(1.0)

    @tf.function
    def step():
        reduced = tf.distribute.get_replica_context().all_reduce("SUM", [tf.constant(1.0 + choros.rank())])
        optimizer.apply_gradients(zip(reduced, [variable], strict=True), skip_gradients_aggregation=True)

    here.run(step)
    assert float(variable) == 1.0 - 3.0


def case_batch_normalization_that_asks_for_all_replicas_in_a_custom_loop():
    here = strategy()
    with here.scope():
        layer = tf.keras.layers.BatchNormalization(synchronized=True)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    mine = x[4 * choros.rank() : 4 * choros.rank() + 4]
    here.run(tf.function(lambda rows: layer(rows, training=True)), args=(mine,))
    expected = 0.01 * x.mean(axis=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), expected, rtol=1e-4)


def differ(draw) -> bool:
    """Whether the ranks draw other numbers."""
    first, *others = allgather_object(np.array(draw()).tolist())
    return all(other != first for other in others)


def case_random_numbers_differ_between_replicas_of_a_loop():
    here = strategy()
    with here.scope():
        generator = tf.random.Generator.from_seed(1)
    for wrap in (lambda function: function, tf.function):
        for draw, expected in (
            (lambda: tf.random.uniform([2]), True),
            (lambda: tf.random.uniform([2], seed=4), True),
            (lambda: tf.nn.dropout(tf.ones([40]), 0.5), True),
            (lambda: generator.uniform([2]), True),
            (lambda: keras.random.uniform([2]), True),
            (lambda: tf.random.stateless_uniform([2], [1, 2]), False),
            (lambda: keras.random.uniform([2], seed=7), False),
        ):
            assert differ(wrap(lambda draw=draw: here.run(draw))) == expected
        assert not differ(wrap(lambda: generator.uniform([2])))
        assert not differ(generator.state.numpy)
    first, again = [], []
    for drawn in (first, again):
        tf.random.set_seed(5)
        drawn += [here.run(lambda: tf.random.uniform([2])).numpy().tolist() for _ in range(2)]
    assert first == again
    assert first[0] != first[1]
    assert not differ(lambda: tf.random.uniform([2]))
    tf.random.set_seed(None)


class Drawing(tf.keras.layers.Layer):
    """Keeps the numbers that its last training step has drawn."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.drawn = tf.Variable(tf.zeros([2]), trainable=False)

    def call(self, x, training=False):
        if training:
            self.drawn.assign(self.draw([2]))
        return x


def case_random_numbers_differ_between_replicas_of_fit():
    here = strategy()
    with here.scope():
        generator = tf.random.Generator.from_seed(1)
    for draw in (tf.random.uniform, generator.uniform):
        with here.scope():
            layer = Drawing(draw)
            model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=4, verbose=0)
        assert differ(layer.drawn.numpy)
    assert not differ(generator.state.numpy)


def case_parts_of_variables_that_replicas_assign():
    """What they add is aggregated as an ``assign_add`` of it; other parts are those of the first replica, or errors."""
    here, rank, how = strategy(), choros.rank(), tf.VariableAggregation
    rows = tf.IndexedSlices(
        tf.fill([2, 1], 2.0 + 2 * rank), tf.constant([rank, rank])
    )  # twice 2 to row 0, or 4 to row 1
    one = tf.fill([1, 1], 1.0 + rank)
    totals = {
        how.SUM: ([4, 8, 0], [0, 0, 0]),
        how.MEAN: ([2, 4, 0], [0, 0, 0]),
        how.ONLY_FIRST_REPLICA: ([4, 0, 0], [0, 0, 0]),
    }
    for compiled in (lambda function: function, tf.function):
        for aggregation, results in totals.items():
            with here.scope():
                variable = tf.Variable(tf.zeros([3, 1]), aggregation=aggregation)
            for method, total in zip((variable.scatter_add, variable.scatter_sub), results, strict=True):
                compiled(lambda method=method: here.run(method, args=(rows,)))()
                np.testing.assert_array_equal(variable[:, 0], total)
            for assign in (
                lambda variable=variable: variable.scatter_update(tf.IndexedSlices(one, tf.constant([2]))),
                lambda variable=variable: variable.scatter_nd_update([[2]], one),
                lambda variable=variable: variable[2:].assign(one),
            ):
                step = compiled(lambda assign=assign: here.run(assign))
                if aggregation != how.ONLY_FIRST_REPLICA:
                    with pytest.raises(ConfigError, match=r"a part of the variable .* Use scatter_add"):
                        step()
                else:
                    step()
                    np.testing.assert_array_equal(variable[:, 0], [0, 0, 1])
                    variable.assign(tf.zeros([3, 1]))
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": how.SUM}
    with here.scope():
        variable, own = tf.Variable(tf.zeros([3, 1])), tf.Variable(tf.zeros([3, 1]), **on_read)
    for assign in (variable.scatter_add, variable.scatter_update):
        with pytest.raises(ConfigError, match="aggregation=NONE"):
            here.run(assign, args=(rows,))
    here.run(own.scatter_add, args=(rows,))
    np.testing.assert_array_equal(own.numpy()[:, 0], [4, 8, 0])


@pytest.mark.parametrize("compiled", ["", "in a replica", "outside"])
def case_variables_that_replicas_create(compiled):
    """They start from the same values, and are aggregated unless a compiled function creates them."""
    here, rank = strategy(), choros.rank()
    made = []

    def step(**how):
        if not made:
            made.append(tf.Variable(tf.random.normal([2]), **how))
        return made[0] + 1.0

    function = tf.function(step) if compiled == "in a replica" else step
    run = tf.function(here.run) if compiled == "outside" else here.run
    first, second = allgather_object(run(function).numpy())
    np.testing.assert_array_equal(first, second)

    made.clear()
    summed = {"aggregation": tf.VariableAggregation.SUM}
    if compiled:
        with pytest.raises(ConfigError, match="is created in a tf"):
            run(function, kwargs=summed)
        return
    run(function, kwargs=summed)
    here.run(lambda: made[0].assign([1.0 + rank] * 2))
    np.testing.assert_array_equal(made[0], [3, 3])
    with here.scope(), here.scope():
        nested = tf.Variable(0.0, **summed)
    here.run(nested.assign, args=(1.0 + rank,))
    assert nested.numpy() == 3.0


def case_one_scope_object_is_entered_repeatedly():
    scope = strategy().scope()
    for _ in range(2):
        with scope, scope as here:
            assert distribute.get_strategy() is here
            assert answers() == (True, True, 2)
        assert not distribute.has_strategy()
    with pytest.raises(ZeroDivisionError), scope:
        raise ZeroDivisionError
    assert not distribute.has_strategy()


def case_a_strategy_is_set_for_the_cells_of_a_notebook():
    here, other = strategy(), distribute.MultiWorkerMirroredStrategy()
    for each in (here, other):
        distribute.experimental_set_strategy(each)
        assert distribute.get_strategy() is each is tf.distribute.get_strategy()
        with each.scope(), pytest.raises(StrategyError, match="outside of all `with` blocks"):
            distribute.experimental_set_strategy(None)
    distribute.experimental_set_strategy(None)
    assert (distribute.has_strategy(), answers()) == (False, OUTSIDE)


def case_older_names():
    def numbers(context):
        return tf.data.Dataset.range(4).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    with pytest.warns(DeprecationWarning, match="use distribute_datasets_from_function"):
        data = strategy().experimental_distribute_datasets_from_function(numbers)
    assert [batch.numpy().tolist() for batch in data] == [[choros.rank(), choros.rank() + 2]]


def case_the_cluster_has_one_chief():
    resolver = distribute.MultiWorkerMirroredStrategy().cluster_resolver
    cluster = resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id) == ("worker", choros.rank())
    assert tf.train.ClusterSpec(cluster.as_dict()).num_tasks("worker") == 2
    assert len(set(cluster.as_dict()["worker"])) == 2
    own = cluster.task_address(resolver.task_type, resolver.task_id)
    assert resolver.master("worker", choros.rank(), "grpc") == f"grpc://{own}"


def case_names_that_keras_and_tensorflow_have_dropped():
    """The table of docs/older_scripts.md is true of the installed versions."""
    dropped = "ConfigProto Session parse_single_example FixedLenFeature decode_raw random_crop"
    assert [name for name in dropped.split() if hasattr(tf, name)] == []
    assert not hasattr(tf.image, "resize_image_with_crop_or_pad")
    assert not hasattr(tf.data.Dataset.range(1), "make_one_shot_iterator")
    assert not hasattr(tf.distribute.Strategy, "experimental_run_v2")
    assert not hasattr(keras.losses, "Reduction")
    assert not hasattr(tf.keras.utils, "experimental")
    assert not hasattr(keras.metrics.Mean(), "reset_states")
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.25))
    assert not hasattr(optimizer, "lr")
    optimizer.iterations.assign(4)
    assert float(optimizer.learning_rate) == 0.5 / (1 + 0.25 * 4)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    errors = [
        lambda: keras.optimizers.SGD(lr=0.1),
        lambda: model.compile("sgd", "mse", experimental_run_tf_function=False),
        lambda: keras.callbacks.ModelCheckpoint("ckpt_{epoch}", save_weights_only=True),
        lambda: keras.callbacks.ModelCheckpoint("ckpt"),
        lambda: model.save("folder"),
        lambda: model.save("model.keras", save_format="tf", signatures=None),
        lambda: model.load_weights("folder/ckpt-1"),
        lambda: keras.models.load_model("folder"),
    ]
    for error in errors:
        with pytest.raises((TypeError, ValueError)):
            error()
    with pytest.warns(UserWarning, match="`decay` is no longer supported"):
        keras.optimizers.SGD(0.1, decay=0.1)
