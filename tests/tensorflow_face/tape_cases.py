"""Loops with the distributed tape on several ranks equal loops with TensorFlow's tape on one.

Run by ``test_tensorflow_face.py`` on 2 and 3 ranks. Rank 0 trains with plain TensorFlow on the whole data as the
reference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import choros.tensorflow as hvd
from choros.errors import ConfigError, DriftError, MismatchError
from choros.tensorflow import reduction
from ranks.reference import of_one_rank

WORDS, LENGTH, CLASSES = 40, 4, 3
#: The last batch has one row: every rank but one has none.
SIZES = (12, 7, 12, 1)
#: Compiles a function, or calls it as it is.
CALLS: list[Callable[..., Any]] = [lambda function: function, tf.function]


def batches(sizes: Iterable[int] = SIZES) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [
        (
            generator.integers(0, WORDS, (size, LENGTH)).astype(np.int32),
            generator.integers(0, CLASSES, size).astype(np.int32),
        )
        for size in sizes
    ]


def own_rows(array: np.ndarray) -> np.ndarray:
    return np.array_split(array, hvd.size())[hvd.rank()]


def build(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((LENGTH,), dtype="int32"), keras.layers.Embedding(WORDS, 6), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)])


def losses(model: keras.Model, x: Any, y: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(weight.numpy()) for weight in model.weights]


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02, global_clipnorm=0.5)


@cache
def plain(sizes: tuple[int, ...] = SIZES, *, dense: bool = False) -> list[np.ndarray]:
    """The weights after a loop of plain TensorFlow on the whole batches; of embeddings sparse or dense."""

    def trained() -> list[np.ndarray]:
        model, optimizer = build(), adam()
        for x, y in batches(sizes):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(model, x, y))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = [tf.convert_to_tensor(each) for each in gradients] if dense else gradients
            optimizer.apply(gradients, model.trainable_variables)
        return weights(model)

    return of_one_rank(trained)


def assert_same(ours: Iterable[Any], theirs: Iterable[Any], rtol: float = 1e-4) -> None:
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=rtol, atol=rtol / 10)


def check_loop(
    call: Callable[..., Any], sizes: tuple[int, ...], gradients: Callable[..., Any], *, dense: bool = False
) -> None:
    """Trains as TensorFlow's guides do: a step, and after the first one a broadcast."""
    model, optimizer = build(seed=1 if hvd.rank() == 0 else 2), adam()

    def step(x: Any, y: Any) -> Any:
        found = gradients(model, x, y)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    signature = [tf.TensorSpec([None, LENGTH], tf.int32), tf.TensorSpec([None], tf.int32)]
    step = tf.function(step, input_signature=signature) if call is tf.function else step
    for x, y in batches(sizes):
        step(tf.constant(own_rows(x)), tf.constant(own_rows(y)))
    assert_same(weights(model), plain(sizes, dense=dense))
    for weight in weights(model):
        np.testing.assert_array_equal(weight, hvd.broadcast_object(weight, 0))


def case_even_batches() -> None:
    def gradients(model: keras.Model, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(model, x, y))
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, model.trainable_variables)

    for call in CALLS:
        check_loop(call, (12, 6, 12), gradients)


def case_uneven_batches_of_known_sizes() -> None:
    def gradients(model: keras.Model, x: Any, y: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.math.divide_no_nan(tf.reduce_sum(losses(model, x, y)), tf.cast(tf.shape(x)[0], tf.float32))
        return tape.gradient(loss, model.trainable_variables, examples=tf.shape(x)[0])

    for call in CALLS:
        check_loop(call, SIZES, gradients)


def case_uneven_batches_whose_losses_are_summed() -> None:
    def gradients(model: keras.Model, x: Any, y: Any) -> Any:
        total = hvd.allreduce(tf.cast(tf.shape(x)[0], tf.float32), op=hvd.Sum)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(model, x, y)) / total
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, model.trainable_variables)

    for call in CALLS:
        check_loop(call, SIZES, gradients)


def case_accumulated_gradients() -> None:
    def gradients(model: keras.Model, x: Any, y: Any) -> Any:
        sums = [tf.zeros(variable.shape) for variable in model.trainable_variables]
        for part in (slice(None, None, 2), slice(1, None, 2)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(model, x[part], y[part])) / 2
            own = hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, model.trainable_variables)
            sums = [total + each for total, each in zip(sums, own, strict=True)]
        return sums

    check_loop(tf.function, (12, 12), gradients, dense=True)


def case_sparse_gradients_stay_sparse() -> None:
    table = tf.Variable(tf.zeros([WORDS, 2]))
    rows = [hvd.rank(), WORDS - 1]
    for call in CALLS:
        for as_dense in (False, True):

            def gradient(as_dense: bool = as_dense) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.gather(table, rows))
                return hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(loss, table)

            given = call(gradient)()
            assert isinstance(given, tf.IndexedSlices) is not as_dense
            expected = np.zeros((WORDS, 2), np.float32)
            expected[: hvd.size()] = 1 / hvd.size()
            expected[-1] = 1
            np.testing.assert_allclose(tf.convert_to_tensor(given), expected, rtol=1e-6)


def case_two_models_with_a_tape_each() -> None:
    """A GAN: each model's gradients depend on the other's weights."""

    def train(wrap: Callable[[Any], Any], call: Callable[..., Any], rows: Callable[..., Any]) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
        critic = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05)]
        for model, optimizer in zip((generator, critic), optimizers, strict=True):
            optimizer.build(model.trainable_variables)

        def step(noise: Any, real: Any) -> None:
            with tf.GradientTape() as of_generator, tf.GradientTape() as of_critic:
                fake = generator(noise)
                fooled = tf.reduce_mean(tf.nn.softplus(-critic(fake)))
                caught = tf.reduce_mean(tf.nn.softplus(critic(fake))) + tf.reduce_mean(tf.nn.softplus(-critic(real)))
            for model, optimizer, tape, loss in (
                (generator, optimizers[0], of_generator, fooled),
                (critic, optimizers[1], of_critic, caught),
            ):
                found = wrap(tape).gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

        step = call(step)
        draws = np.random.default_rng(4)
        for _ in range(3):
            step(rows(draws.normal(size=(6, 2)).astype("float32")), rows(draws.normal(size=(6, 4)).astype("float32")))
        return [*weights(generator), *weights(critic)]

    expected = of_one_rank(lambda: train(lambda tape: tape, lambda function: function, lambda array: array))
    for call in CALLS:
        assert_same(train(hvd.DistributedGradientTape, call, own_rows), expected)


def case_structures_of_sources() -> None:
    mean = (hvd.size() - 1) / 2
    first, second, unused = (tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(0.0))
    kept = keras.Variable(2.0)
    for call in CALLS:

        def gradients() -> Any:
            own = tf.constant(float(hvd.rank()))
            with tf.GradientTape(persistent=True) as tape:
                loss = own * (tf.reduce_sum(first) * 2 + second * 3 + kept * 4)
            wrapped = hvd.DistributedGradientTape(tape)
            nested = wrapped.gradient(loss, {"a": [first, (second,)], "b": unused, "c": kept})
            weighted = wrapped.gradient([loss, loss], first, output_gradients=[tf.constant(1.0), tf.constant(9.0)])
            zeros = wrapped.gradient(loss, [unused], unconnected_gradients=tf.UnconnectedGradients.ZERO)
            none = wrapped.gradient(loss, [unused])
            return nested, weighted, zeros, none, tape.gradient(loss, second)

        nested, weighted, zeros, none, own = call(gradients)()
        np.testing.assert_allclose(nested["a"][0], [2 * mean] * 2)
        np.testing.assert_allclose(nested["a"][1][0], 3 * mean)
        assert nested["b"] is None
        np.testing.assert_allclose(nested["c"], 4 * mean)
        np.testing.assert_allclose(weighted, [20 * mean] * 2)
        np.testing.assert_allclose(zeros[0], 0)
        assert none == [None]
        np.testing.assert_allclose(own, 3 * hvd.rank())  # the tape that was wrapped remains this rank's


def case_a_tape_is_used_up_as_before() -> None:
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = variable * 2.0
    hvd.DistributedGradientTape(tape).gradient(loss, variable)
    with pytest.raises(RuntimeError, match="only be used to compute one set of gradients"):
        tape.gradient(loss, variable)
    with tf.GradientTape() as tape:
        tape = hvd.DistributedGradientTape(tape)
        loss = variable * float(hvd.rank())
    assert isinstance(tape, tf.GradientTape)
    assert float(tape.gradient(loss, variable)) == (hvd.size() - 1) / 2


def case_gradients_of_gradients() -> None:
    for call in CALLS:
        variable = tf.Variable(float(2))

        def second(variable: Any = variable) -> Any:
            own = tf.constant(float(hvd.rank() + 1))
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = own * variable**3
                first = hvd.DistributedGradientTape(inner).gradient(loss, variable)
            return outer.gradient(first, variable)

        # The first is the mean over ranks of (rank + 1) · 3 · variable²; its sum over all ranks has this gradient.
        np.testing.assert_allclose(call(second)(), (hvd.rank() + 1) * 6 * 2.0)


def case_local_sources() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    x = tf.constant([[1.0 + hvd.rank(), 2.0]])

    def gradients(wrap: Callable[[Any], Any]) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return [each.numpy() for each in wrap(tape).gradient(loss, model.trainable_variables)]

    hvd.broadcast_variables(model.variables, 0)
    own = gradients(lambda tape: tape)
    means = [np.mean(hvd.allgather_object(each), axis=0) for each in own]
    for scale, divisor in ((True, hvd.size()), (False, 1)):
        given = gradients(
            lambda tape, scale=scale: hvd.PartialDistributedGradientTape(
                tape, local_layers=model.layers[0], scale_local_gradients=scale
            )
        )
        assert_same(given, [own[0] / divisor, own[1] / divisor, means[2], means[3]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    local, shared = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert [source is each for (source, _), each in zip(local + shared, model.trainable_variables, strict=True)] == [
        True
    ] * 4
    assert len(local) == 2
    assert_same([each.numpy() for _, each in local + shared], [own[0] / 2, own[1] / 2, means[2], means[3]])
    with pytest.raises(ConfigError, match="must be layers of Keras, but one is a str"):
        gradients(lambda tape: hvd.PartialDistributedGradientTape(tape, local_layers=["dense"]))
    with pytest.raises(ConfigError, match="is not built"):
        gradients(lambda tape: hvd.PartialDistributedGradientTape(tape, local_layers=[keras.layers.Dense(1)]))


def case_options_of_the_reduction() -> None:
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable([[4.0]])]
    expected = [np.full(variable.shape, (hvd.size() + 1) / 2) for variable in variables]
    for options in (
        {"compression": hvd.Compression.fp16},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"num_groups": 2},
        {"groups": [[variables[2], variables[0]], [tf.Variable(0.0)]]},
        {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"},
    ):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable) for variable in variables) * (hvd.rank() + 1)
        assert_same(hvd.DistributedGradientTape(tape, **options).gradient(loss, variables), expected, rtol=1e-3)


def case_a_process_set_reduces_its_members_gradients() -> None:
    last = hvd.size() - 1
    members = hvd.add_process_set([last])
    variable = tf.Variable(0.0)
    for process_set, expected in ((members, float(hvd.rank())), (hvd.global_process_set, last / 2)):
        with tf.GradientTape() as tape:
            loss = variable * float(hvd.rank())
        assert float(hvd.DistributedGradientTape(tape, process_set=process_set).gradient(loss, variable)) == expected
    hvd.remove_process_set(members)


def case_ranks_with_different_numbers_of_batches_join() -> None:
    """Each step averages over the ranks that still have a batch, and so does the loop of one process."""
    for call in CALLS:
        variable = tf.Variable([1.0, 1.0])

        def step(number: Any, variable: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * number)
            variable.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, variable))
            return hvd.allreduce(number)

        compiled = call(functools.partial(step, variable=variable))
        means = [float(compiled(tf.constant(1.0 + hvd.rank()))) for _ in range(2 + 3 * hvd.rank())]
        last = int(hvd.join())
        assert last == hvd.size() - 1
        hvd.broadcast_variables([variable], root_rank=last)
        np.testing.assert_allclose(variable, np.full(2, 1 - 2 * 1.5 - 3 * 2.0))
        assert means == ([1.5, 1.5] if hvd.rank() == 0 else [1.5, 1.5, 1.0, 1.0, 1.0])


def case_a_rank_without_batches_joins_before_its_first_step() -> None:
    """It learns of the gradients of the others from these; in the next epoch it has batches, too."""
    arguments = [{}, {"compression": hvd.Compression.fp16}, {"groups": 2}, {"op": hvd.Sum}, {"op": hvd.Adasum}]
    for call, options in itertools.product(CALLS, arguments):
        reduction._reducers.clear()
        variables = [tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros([3, 1]))]
        sparse = options.get("op") != hvd.Adasum

        def step(number: Any, variables: Any = tuple(variables), sparse: bool = sparse, options: Any = options) -> None:
            with tf.GradientTape() as tape:
                rows = tf.gather(variables[1], [2, 0, 2]) if sparse else variables[1]
                loss = number * (tf.reduce_sum(variables[0]) + tf.reduce_sum(rows))
            gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_add(tf.convert_to_tensor(gradient))

        step = call(step)
        per_unit = [np.ones(2), np.array([[1], [0], [2]]) if sparse else np.ones([3, 1])]
        for first, expected in ((0, 3), (1, 6 if options.get("op") != hvd.Sum else 3 + 3 * hvd.size())):
            if hvd.rank() == hvd.size() - 1 or first:
                step(tf.constant(1.0))
                step(tf.constant(2.0))
            last = int(hvd.join())
            hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
            assert first or last == hvd.size() - 1
            assert_same(variables, [expected * each for each in per_unit], rtol=1e-3)
    reduction._reducers.clear()
    compression = hvd.Compression.power_sgd()
    if hvd.rank() == 0:
        with pytest.raises(MismatchError, match=r"join\(\)"):
            hvd.join()
    else:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0])
        with pytest.raises(MismatchError, match=r"join\(\)"):
            hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variables[0]])
    reduction._reducers.clear()


def case_ranks_without_a_broadcast_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_COMPARED_STEP", 3)
    for call in CALLS:
        variable = tf.Variable(float(hvd.rank()), name="w")

        def step(variable: Any = variable) -> None:
            with tf.GradientTape() as tape:
                loss = variable * 2.0
            (found,) = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
            variable.assign_sub(0.1 * found)

        step = call(step)
        step()
        step()
        # TensorFlow passes errors of the host out of a compiled function as its own.
        with pytest.raises((DriftError, tf.errors.UnknownError), match=r"w.*broadcast_variables\(model\.variables"):
            step()
        reduction._reducers.clear()


def case_invalid_arguments_are_errors() -> None:
    tape = tf.GradientTape()
    for options, text in (
        ({"gradient_predivide_factor": 0.0}, "must be greater than 0"),
        ({"op": hvd.Max}, "with Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"groups": -1}, "must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedGradientTape(tape, **options)
    with pytest.raises(ConfigError, match=r"takes a tf\.GradientTape that is not distributed yet, not a GradientTape"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))
    with pytest.raises(ConfigError, match="not a float"):
        hvd.DistributedGradientTape(1.0)


def case_different_gradients_mismatch() -> None:
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(4.0)]
    own = hvd.rank() % 2
    # A missing gradient, one of another variable, and then ranks are in step again.
    for used in (variables[: 1 + own], variables[1 + own :][:1], variables):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable) for variable in used)
        wrapped = hvd.DistributedGradientTape(tape)
        if used is variables:
            assert float(wrapped.gradient(loss, variables)[1]) == 1.0
        else:
            with pytest.raises(MismatchError, match="float32"):
                wrapped.gradient(loss, variables)
