"""Gradients that are applied in ``strategy.run``: two replicas equal plain Keras on the sum of their gradients."""

from __future__ import annotations

from itertools import pairwise

import keras
import numpy as np
import pytest

import choros
from choros import distribute
from choros.comm import global_process_set
from choros.errors import StrategyError
from choros.observe import events
from choros.observe.events import Kind

SHAPES = ((3, 2), (4,), ())
STEPS = 4


def gradients(step, replica):
    """Returns the gradients of one replica."""
    draws = np.random.default_rng((step, replica))
    return [draws.standard_normal(shape).astype("float32") for shape in SHAPES]


def sums(step):
    """Returns the sums over the replicas."""
    return [sum(parts) for parts in zip(*(gradients(step, replica) for replica in range(2)), strict=True)]


def made_variables():
    return [keras.Variable(np.full(shape, 0.5, "float32"), name=f"v{len(shape)}") for shape in SHAPES]


def apply_all(optimizers, variables, tensors):
    for optimizer in optimizers:
        optimizer.apply(tensors, variables)


def check(*make, apply=apply_all, gradients=gradients, sums=sums) -> None:
    """Compares variables after steps of optimizers in ``strategy.run`` with those after the same steps elsewhere."""
    here = distribute.MirroredStrategy()
    with here.scope():
        ours, optimizers = made_variables(), [each() for each in make]
    theirs, plain = made_variables(), [each() for each in make]
    for step in range(STEPS):
        tensors = [keras.ops.convert_to_tensor(each) for each in gradients(step, choros.rank())]
        here.run(apply, args=(optimizers, ours, tensors))
        apply(plain, theirs, [keras.ops.convert_to_tensor(each) for each in sums(step)])
    for mine, expected in zip(ours, theirs, strict=True):
        mine, expected = map(keras.ops.convert_to_numpy, (mine, expected))
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)


def case_momentum_clipping_decay_and_moving_average():
    check(
        lambda: keras.optimizers.AdamW(
            0.01, global_clipnorm=0.5, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=2
        )
    )


def case_an_optimizer_that_applies_updates_through_others():
    def several():
        first, others = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(lambda variable: first if len(variable.shape) == 2 else others)

    check(several)


def case_one_reduction_per_step():
    """All gradients of a step are fused; of a micro-batch before the last, only the control message is sent."""

    def collectives(make) -> tuple[int, list[str]]:
        kinds: list[str] = []
        here = distribute.MirroredStrategy()
        with here.scope():
            variables, optimizers = made_variables(), [make()]
            optimizers[0].build(variables)
        before = global_process_set.communicator.collectives
        stop = events.listen(lambda event: kinds.append(event.kind))
        for step in range(STEPS):
            tensors = [keras.ops.convert_to_tensor(each) for each in gradients(step, choros.rank())]
            here.run(apply_all, args=(optimizers, variables, tensors))
        stop()
        return global_process_set.communicator.collectives - before, kinds

    assert global_process_set.communicator.size == 2
    number, kinds = collectives(lambda: keras.optimizers.SGD(0.1))
    assert (number, kinds.count(Kind.STEP_DONE)) == (STEPS + 3, STEPS)  # variables are compared after steps 1, 2 and 4
    number, kinds = collectives(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    assert (number, kinds.count(Kind.STEP_DONE)) == (STEPS + 2, STEPS // 2)


def case_micro_batches():
    check(lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))


def case_missing_gradients():
    def apply(optimizers, variables, tensors):
        optimizers[0].apply([tensors[0], None, tensors[2]], variables)

    with pytest.warns(UserWarning, match="do not exist"):
        check(lambda: keras.optimizers.Adam(0.01), apply=apply)


def case_several_optimizers_in_one_step():
    def apply(optimizers, variables, tensors):
        first, second = optimizers
        first.apply(tensors[:1], variables[:1])
        second.apply(tensors[1:], variables[1:])

    check(lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1), apply=apply)


def case_an_optimizer_applied_twice_in_one_step():
    def apply(optimizers, variables, tensors):
        (optimizer,) = optimizers
        if not optimizer.built:
            optimizer.build(variables)
        optimizer.apply(tensors[:1], variables[:1])
        optimizer.apply(tensors[1:], variables[1:])

    check(lambda: keras.optimizers.Adam(0.01), apply=apply)


def case_calls_of_the_host_are_ordered_in_a_compiled_step():
    """The comparison, too, which reads variables."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    here = distribute.MirroredStrategy()
    with here.scope():
        variables, optimizer = made_variables(), keras.optimizers.SGD(0.1)
        optimizer.build(variables)
    tensors = [tf.constant(each) for each in gradients(0, choros.rank())]

    def step():
        optimizer.apply(tensors, variables)
        return tf.reduce_sum(tensors[0])

    @tf.function
    def distributed_step():
        return here.reduce("SUM", here.run(step), axis=None)

    graph = distributed_step.get_concrete_function().graph
    functions = graph.as_graph_def().library.function
    types = {function.signature.name: {each.op for each in function.node_def} for function in functions}

    def calls_the_host(operation) -> bool:
        branch = operation.type == "If" and operation.get_attr("then_branch").name
        return operation.type == "PyFunc" or "PyFunc" in types.get(branch, ())

    calls = [each for each in graph.get_operations() if calls_the_host(each)]
    assert [each.type for each in calls] == ["PyFunc", "If", "PyFunc"]  # gradients, the comparison, the loss
    assert [any(tensor.dtype == tf.resource for tensor in each.inputs) for each in calls] == [False, True, False]
    for earlier, later in pairwise(calls):
        assert earlier in later.control_inputs


@pytest.mark.parametrize("skip", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}])
def case_gradients_that_the_step_has_reduced(skip):
    def apply(optimizers, variables, tensors):
        (optimizer,) = optimizers
        replica = distribute.get_replica_context() if distribute.has_strategy() else None
        if replica is None:
            optimizer.apply(tensors, variables)
        else:
            optimizer.apply_gradients(zip(replica.all_reduce("SUM", tensors), variables, strict=True), **skip)

    check(lambda: keras.optimizers.SGD(0.1), apply=apply)


def case_batch_normalization_of_a_batch_without_rows():
    """The replica without rows keeps its statistics; in a compiled function it may not know how many rows there are."""
    here = distribute.MirroredStrategy()
    with here.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 2))
    rows = np.array([[1.0, 2.0], [3.0, 6.0]], "float32")[: 2 if choros.rank() == 0 else 0]

    def run(rows):
        return here.run(lambda: layer(rows, training=True))

    runs = [run]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        runs += [tf.function(run), tf.function(run, input_signature=[tf.TensorSpec((None, 2))])]
    for each in runs:
        layer.moving_mean.assign([8.0, 8.0])
        outputs = keras.ops.convert_to_numpy(each(keras.ops.convert_to_tensor(rows)))
        np.testing.assert_allclose(outputs, np.array([[-1, -1], [1, 1]])[: len(rows)], rtol=1e-2)
        means = [keras.ops.convert_to_numpy(weight) for weight in layer.non_trainable_variables]
        assert all(np.isfinite(each).all() for each in means), means


class StepThatReduces(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 2))
        self.built = True

    def train_step(self, x):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.dense(x) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        reduced = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        pairs = zip(reduced, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
        return {"loss": loss}


def case_a_step_of_fit_that_reduces_gradients_itself():
    """Nothing else would reduce them."""
    if keras.backend.backend() != "tensorflow":
        return
    with distribute.MirroredStrategy().scope():
        model = StepThatReduces()
        model.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(StrategyError, match="skip_gradients_aggregation=True"):
        model.fit(np.ones((8, 2), "float32"), batch_size=4, verbose=0)


@pytest.mark.parametrize("compiled", [False, True] if keras.backend.backend() == "tensorflow" else [False])
def case_reduced_gradients_and_slices_of_the_state(compiled):
    """Eager, before they are made."""
    with distribute.MirroredStrategy(shard_state=True).scope() as here:
        ours, optimizer = made_variables(), keras.optimizers.Adam(0.1)
    theirs, plain = made_variables(), keras.optimizers.Adam(0.1)

    def apply(tensors):
        reduced = distribute.get_replica_context().all_reduce("SUM", tensors)
        optimizer.apply_gradients(zip(reduced, ours, strict=True), skip_gradients_aggregation=True)

    def run(tensors):
        here.run(apply, args=(tensors,))

    if compiled:
        import tensorflow as tf

        optimizer.build(ours)
        run = tf.function(run)
    for step in range(STEPS):
        run([keras.ops.convert_to_tensor(each) for each in gradients(step, choros.rank())])
        plain.apply([keras.ops.convert_to_tensor(each) for each in sums(step)], theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        mine, expected = map(keras.ops.convert_to_numpy, (mine, expected))
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)


def case_infinity_on_one_replica_skips_the_step_on_all():
    def infinite(step, replica):
        own = gradients(step, replica)
        if (step, replica) == (1, 1):
            own[0][0, 0] = np.inf
        return own

    def apply(optimizers, variables, tensors):
        (optimizer,) = optimizers
        if keras.backend.backend() != "jax":
            optimizer.apply(tensors, variables)
            return
        if not optimizer.built:
            optimizer.build(variables)
        values = [[each.value for each in group] for group in (optimizer.variables, variables)]
        trained, state = optimizer.stateless_apply(values[0], tensors, values[1])
        for variable, value in zip([*variables, *optimizer.variables], [*trained, *state], strict=True):
            variable.assign(value)

    check(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0),
        apply=apply,
        gradients=infinite,
        sums=lambda step: [sum(parts) for parts in zip(infinite(step, 0), infinite(step, 1), strict=True)],
    )


def case_sums_and_recurrent_layers_of_a_batch_without_rows():
    """The second batch has one row; iterated eagerly, the other replica's has the static shape (0, 3, 2)."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    def made():
        keras.utils.set_random_seed(1)
        x = keras.Input((3, 2))
        hidden = keras.layers.LSTM(4)(keras.layers.Add()([x, keras.layers.Dense(2)(x)]))
        model = keras.Model(x, keras.layers.Add()([hidden, keras.layers.Dense(4)(hidden)]))
        return model, keras.optimizers.SGD(0.1)

    def trained(model, optimizer, run, batches, compiled):
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        def distributed(batch):
            run(step, args=(batch,))

        distributed = tf.function(distributed) if compiled else distributed
        for batch in batches:
            distributed(batch)
        return [weight.numpy() for weight in model.weights]

    rows = np.random.default_rng(0).standard_normal((5, 3, 2)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    expected = trained(*made(), lambda step, args: step(*args), batches, True)
    here = distribute.MirroredStrategy()
    for compiled in (False, True):
        with here.scope():
            model, optimizer = made()
        own = trained(model, optimizer, here.run, here.experimental_distribute_dataset(batches), compiled)
        for mine, theirs in zip(own, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
