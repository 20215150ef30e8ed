"""Horovod's TensorFlow API, but for the tape: collectives, variables, objects, optimizers and TensorFlow 1's graphs."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import choros.tensorflow as hvd
from choros import durations
from choros.errors import ConfigError, MismatchError
from ranks.reference import of_one_rank

v1 = tf.compat.v1
#: Compiles a function, or calls it as it is.
CALLS: list[Callable[..., Any]] = [lambda function: function, tf.function]


def in_graph(build: Callable[[], Any], *, steps: int = 1, hooks: tuple[Any, ...] = ()) -> Any:
    """The last result of a graph of TensorFlow 1, run in a session."""
    # As many threads as any graph here has collectives that do not depend on each other.
    threads = v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=9)
    with v1.Graph().as_default():
        fetched = build()
        with v1.train.SingularMonitoredSession(hooks=list(hooks), config=threads) as session:
            return [session.run(fetched) for _ in range(steps)][-1]


def rows(rank: int, count: int = 4) -> np.ndarray:
    return np.arange(count * 2, dtype=np.float32).reshape(count, 2) * (rank + 1)


def check(results: Any, expected: Any) -> None:
    if isinstance(results, (list, tuple)):
        for result, value in zip(results, expected, strict=True):
            check(result, value)
    elif isinstance(results, dict):
        check([results[name] for name in expected], list(expected.values()))
    else:
        np.testing.assert_allclose(results, expected, rtol=1e-6)


def expected_results() -> dict[str, Any]:
    """Of two ranks that have ``rows(rank)``, and of ``rows(rank, 2)`` in groups."""
    total, half = rows(0) + rows(1), slice(2, 4) if hvd.rank() else slice(0, 2)
    small = rows(0, 2) + rows(1, 2)
    one = slice(1, 2) if hvd.rank() else slice(0, 1)
    return {
        "allreduce": total / 2,
        "allreduce of both factors": total * 6,
        "grouped_allreduce": [total, small],
        "allgather": np.concatenate([rows(0), rows(1)]),
        "grouped_allgather": [np.concatenate([rows(0), rows(1)]), np.concatenate([rows(0, 2), rows(1, 2)])],
        "broadcast": rows(1),
        "alltoall": np.concatenate([rows(0)[half], rows(1)[half]]),
        "reducescatter": total[half] / 2,
        "grouped_reducescatter": [total[half], small[one]],
    }


def collectives(x: Any, y: Any) -> dict[str, Any]:
    return {
        "allreduce": hvd.allreduce(x),
        "allreduce of both factors": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
        "grouped_allreduce": hvd.grouped_allreduce([x, y], op=hvd.Sum),
        "allgather": hvd.allgather(x),
        "grouped_allgather": hvd.grouped_allgather([x, y]),
        "broadcast": hvd.broadcast(x, root_rank=1),
        "alltoall": hvd.alltoall(x),
        "reducescatter": hvd.reducescatter(x, compression=hvd.Compression.fp16),
        "grouped_reducescatter": hvd.grouped_reducescatter([x, y], op=hvd.Sum),
    }


def case_each_collective_of_variables() -> None:
    own, small = rows(hvd.rank()), rows(hvd.rank(), 2)
    check(tf.function(collectives)(tf.Variable(own), tf.constant(small)), expected_results())
    check(collectives(keras.Variable(own), small), expected_results())


def case_each_collective_in_a_graph_of_tensorflow_1() -> None:
    own, small = rows(hvd.rank()), rows(hvd.rank(), 2)
    # All in one run, in whatever order each rank's threads begin them.
    given = in_graph(lambda: collectives(tf.constant(own, name="x"), tf.constant(small, name="y")), steps=3)
    check(given, expected_results())
    (given,) = in_graph(lambda: tf.gradients(hvd.allreduce(x := tf.constant(own)) * (hvd.rank() + 1.0), x))
    check(given, np.full_like(own, 1.5))


def case_rows_of_indexed_slices_are_gathered() -> None:
    def reduced(op: Any) -> Any:
        return hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]), tf.constant([3, 2])), op=op)

    for call in CALLS:
        for op, value in ((hvd.Sum, 1.0), (None, 0.5)):
            given = call(lambda op=op: reduced(op))()
            assert isinstance(given, tf.IndexedSlices)
            check(tf.convert_to_tensor(given), np.array([[value] * 2, [value] * 2, [0, 0]]))
    for op in (hvd.Max, hvd.Adasum):
        with pytest.raises(NotImplementedError, match="use Sum or Average") as refused:
            reduced(op)
        assert isinstance(refused.value, ConfigError)


def case_rows_of_integers_are_averaged_as_floats() -> None:
    for dtype, expected in (
        (tf.uint8, tf.float32),
        (tf.int16, tf.float32),
        (tf.int32, tf.float64),
        (tf.int64, tf.float64),
    ):
        given = tf.IndexedSlices(tf.ones([1, 2], dtype), tf.constant([hvd.rank()]), tf.constant([2, 2]))
        for averaged in (hvd.allreduce(given), hvd.grouped_allreduce([given])[0]):
            assert averaged.values.dtype == expected == (given.values / 2).dtype
            check(tf.convert_to_tensor(averaged), np.full([2, 2], 0.5))
        assert hvd.allreduce(given, op=hvd.Sum).values.dtype == dtype
        with pytest.raises(NotImplementedError, match="cast them to float32"):
            hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.5)


def case_a_collective_of_another_process_set_is_an_error_of_tensorflow() -> None:
    mine, other = (hvd.ProcessSet([rank]) for rank in (hvd.rank(), 1 - hvd.rank()))
    for process_set in (mine, other) if hvd.rank() == 0 else (other, mine):
        hvd.add_process_set(process_set)
    with pytest.raises(tf.errors.InvalidArgumentError, match="this rank is not in"):
        hvd.allreduce(tf.ones(2), process_set=other)
    check(hvd.allreduce(tf.ones(2), process_set=mine), np.ones(2))
    for process_set in (mine, other) if hvd.rank() == 0 else (other, mine):
        hvd.remove_process_set(process_set)


def case_dynamic_shapes_and_splits() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def exchange(x: Any) -> Any:
        received, counts = hvd.alltoall(x, splits=[1, 3] if hvd.rank() == 0 else [0, 2])
        return received, counts, hvd.allgather(x)

    received, counts, gathered = exchange(rows(hvd.rank(), 4 if hvd.rank() == 0 else 2))
    check(received, rows(0)[:1] if hvd.rank() == 0 else np.concatenate([rows(0)[1:], rows(1, 2)]))
    assert counts.numpy().tolist() == ([1, 0] if hvd.rank() == 0 else [3, 2])
    check(gathered, np.concatenate([rows(0), rows(1, 2)]))
    equally = tf.function(lambda x: hvd.alltoall(x, splits=[tf.shape(x)[0] // 2] * 2), reduce_retracing=True)
    check(equally(rows(hvd.rank()))[0], np.concatenate([rows(each)[2 * hvd.rank() :][:2] for each in range(2)]))


def case_arrays_of_numpy_become_tensors() -> None:
    own = rows(hvd.rank())
    given = [*tf.nest.flatten(collectives(own, rows(hvd.rank(), 2))), hvd.allreduce(np.float32(1.0))]
    assert [type(each) for each in given if not tf.is_tensor(each)] == []


def case_mismatches_are_errors_of_tensorflow_too() -> None:
    for collective in (
        lambda: hvd.allreduce(tf.ones(3 + hvd.rank())),
        lambda: hvd.allreduce(tf.ones(3, tf.float32 if hvd.rank() else tf.int32)),
        lambda: hvd.grouped_allreduce([tf.ones(3), tf.ones(2 + hvd.rank())]),
        lambda: hvd.allgather(tf.ones([2, 3 + hvd.rank()])),
        lambda: hvd.broadcast(tf.ones(3), root_rank=hvd.rank()),
        lambda: hvd.broadcast_variables([tf.Variable(tf.ones(2 + hvd.rank()))], 0),
        lambda: hvd.reducescatter(tf.ones(4 + hvd.rank())),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1") as caught:
            collective()
        assert isinstance(caught.value, MismatchError)
    for collective in (lambda: hvd.alltoall(tf.ones(3)), lambda: hvd.reducescatter(tf.constant(1.0))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            collective()
        assert isinstance(caught.value, ConfigError)
    check(hvd.allreduce(tf.ones(2)), np.ones(2))  # ranks are in step again


def case_errors_in_compiled_functions_and_sessions_are_those_of_eager_code() -> None:
    session = functools.partial(in_graph, steps=1)
    for call in (lambda function: tf.function(function)(), session):
        with pytest.raises(MismatchError, match=r"rank 0: .*shape=\(3,\)") as mismatch:
            call(lambda: hvd.allreduce(tf.ones(3 + hvd.rank()), name="loss"))
        assert isinstance(mismatch.value, tf.errors.FailedPreconditionError)
        assert isinstance(mismatch.value, tf.errors.InvalidArgumentError)
        assert mismatch.value.error_code == tf.errors.FAILED_PRECONDITION
        with pytest.raises(ConfigError, match="cannot be split equally") as invalid:
            call(lambda: hvd.alltoall(tf.ones(3), name="rows"))
        assert isinstance(invalid.value, tf.errors.InvalidArgumentError)
        check(hvd.allreduce(tf.ones(2)), np.ones(2))  # ranks are in step again
        for error, own in ((mismatch.value, MismatchError), (invalid.value, ConfigError)):
            copy = pickle.loads(pickle.dumps(error))
            assert (type(copy), str(copy)) == (own, error.message)
    # An error that is not choros' stays what it is.
    with pytest.raises(tf.errors.InvalidArgumentError) as other:
        tf.reshape(tf.ones(3), [2])
    assert type(other.value) is tf.errors.InvalidArgumentError


def case_a_session_with_one_thread_is_told_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "NEWCOMER", 0.1)
    names = ["a", "b"] if hvd.rank() else ["b", "a"]
    config = v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=1)
    with v1.Graph().as_default(), v1.Session(config=config) as session:
        fetched = [hvd.allreduce(tf.ones(2), name=name) for name in names]
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"(?s)name='a'.*name='b'.*inter_op_parallelism_threads"
        ):
            session.run(fetched)
    check(hvd.allreduce(tf.ones(2)), np.ones(2))


def case_arguments_of_other_types_are_refused() -> None:
    ragged, sparse = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([1.0, 0.0])
    for given, message in ((ragged, "RaggedTensor cannot be communicated"), (sparse, "SparseTensor cannot be")):
        for collective in (hvd.allreduce, hvd.allgather, lambda value: hvd.broadcast(value, 0)):
            with pytest.raises(ConfigError, match=message):
                collective(given)
    for options, message in (({"name": 5}, "name=5.: expected a str"), ({"process_set": 3}, "expected a ProcessSet")):
        with pytest.raises(ConfigError, match=message):
            hvd.allreduce(tf.ones(2), **options)


def case_average_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="use op=Average") as caught:
        check(hvd.allreduce(tf.ones(2), average=False), np.full(2, 2.0))
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tf.ones(2), average=True, op=hvd.Sum)


def case_variables_are_broadcast() -> None:
    for call in CALLS:
        variables = [tf.Variable(float(hvd.rank())), keras.Variable([2.0 * hvd.rank()] * 2)]
        call(functools.partial(hvd.broadcast_variables, variables, root_rank=1))()
        check(variables, [1.0, [2.0, 2.0]])
        variables = [tf.Variable(hvd.rank()), tf.Variable([hvd.rank()] * 3)]
        check(call(functools.partial(hvd.broadcast_, variables, root_rank=1))(), [1, [1] * 3])
        check(variables, [1, [1] * 3])
    hvd.broadcast_variables([], root_rank=0)
    with pytest.raises(RuntimeError, match=r"in eager code use broadcast_variables"):
        hvd.broadcast_global_variables(0)


def case_objects() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
    assert hvd.broadcast_object_fn(root_rank=1, name="rank")(hvd.rank()) == 1
    assert hvd.allgather_object("a" * hvd.rank()) == ["", "a"]


def case_position_as_tensors() -> None:
    members = hvd.add_process_set([1])

    def position() -> Any:
        own = [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.size_op(members.process_set_id),
        ]
        return [*own, hvd.process_set_included_op(members.process_set_id), hvd.process_set_included_op(99)]

    expected = [hvd.rank(), 2, hvd.local_rank(), hvd.local_size(), 1, int(hvd.rank() == 1), -2]
    for call in CALLS:
        assert [int(each) for each in call(position)()] == expected
    assert in_graph(position) == expected
    hvd.remove_process_set(members)


# optimizers -------------------------------------------------------------------------------------


def regression(n: int = 12) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(n, 3)).astype(np.float32), generator.normal(size=(n, 1)).astype(np.float32)


def train_in_graph(wrap: Callable[[Any], Any], own: slice, *, steps: int, start: float, hooks: Any = ()) -> np.ndarray:
    """Trains a linear model as scripts of TensorFlow 1 do."""

    def build() -> Any:
        x, y = (tf.constant(array[own]) for array in regression())
        weight = v1.get_variable("w", initializer=tf.fill([3, 1], start))
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_mean((x @ weight - y) ** 2)
        train = wrap(v1.train.MomentumOptimizer(0.1, 0.9)).minimize(loss, global_step=step)
        with tf.control_dependencies([train]):
            return [weight.read_value(), step.read_value()]

    weight, counted = in_graph(build, steps=steps, hooks=hooks)
    assert counted == steps
    return weight


def case_a_script_of_tensorflow_1() -> None:
    expected = of_one_rank(lambda: train_in_graph(lambda each: each, slice(None), steps=4, start=1.0))
    own = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)
    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    start = 1.0 if hvd.rank() == 0 else 5.0
    given = train_in_graph(hvd.DistributedOptimizer, own, steps=4, start=start, hooks=hooks)
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    twice = train_in_graph(
        lambda each: hvd.DistributedOptimizer(each, backward_passes_per_step=2, average_aggregated_gradients=True),
        own,
        steps=8,
        start=1.0,
    )
    np.testing.assert_allclose(twice, expected, rtol=1e-5)


def case_shapes_of_tensorflow_1() -> None:
    """After ``disable_v2_behavior()`` a shape has objects instead of numbers."""

    def build() -> list[Any]:
        table, weight = (v1.get_variable(name, initializer=tf.ones([4, 2])) for name in "tw")
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [hvd.rank()]) @ tf.transpose(weight))
        train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(loss)
        mine = hvd.reducescatter(tf.ones([4, 2]), op=hvd.Sum)
        with tf.control_dependencies([train, mine]):
            return [weight.read_value(), table.read_value(), tf.identity(mine)]

    v1.disable_v2_tensorshape()
    try:
        weight, table, mine = in_graph(build)
    finally:
        v1.enable_v2_tensorshape()
    np.testing.assert_allclose(weight, np.zeros((4, 2)))
    np.testing.assert_allclose(table[:, 0], [-1, -1, 1, 1])
    np.testing.assert_allclose(mine, np.full((2, 2), 2.0))


def case_optimizers_in_a_loop() -> None:
    x, y = regression()
    own = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)

    def train(optimizer: Any, call: Callable[..., Any], x: Any, y: Any) -> np.ndarray:
        weight = tf.Variable(tf.ones([3, 1]))

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight - y) ** 2)
            if isinstance(optimizer, v1.train.Optimizer):
                optimizer.apply_gradients(
                    optimizer.compute_gradients(lambda: tf.reduce_mean((x @ weight - y) ** 2), [weight])
                )
            else:
                optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight], strict=True))

        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.build([weight])
        step = call(step)
        for _ in range(4):
            step()
        return weight.numpy()

    expected = of_one_rank(lambda: train(v1.train.GradientDescentOptimizer(0.1), CALLS[0], x, y))
    for make in (lambda: v1.train.GradientDescentOptimizer(0.1), lambda: keras.optimizers.SGD(0.1)):
        for call in CALLS:
            given = train(hvd.DistributedOptimizer(make()), call, x[own], y[own])
            np.testing.assert_allclose(given, expected, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"or one of tf\.compat\.v1\.train, not a str"):
        hvd.DistributedOptimizer("adam")


def case_adasum() -> None:
    """Orthogonal vectors are added, equal ones averaged."""
    apart, same = np.eye(2, dtype=np.float32), np.ones(2, np.float32)
    for call in CALLS:
        weights = [tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2))]

        def gradients(weights: Any = tuple(weights)) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.tensordot(weights[0], apart[hvd.rank()], 1) + tf.tensordot(weights[1], same, 1)
            return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, weights)

        check(call(gradients)(), ([1, 1], [1, 1]))

    def build() -> Any:
        weight = v1.get_variable("w", initializer=tf.zeros(2))
        loss = tf.tensordot(weight, apart[hvd.rank()], 1)
        train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum).minimize(loss)
        with tf.control_dependencies([train]):
            return weight.read_value()

    check(in_graph(build, steps=2), [-1, -1])
    for options in ({"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 2}):
        with pytest.raises(ConfigError, match="needs"):
            hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum, **options)


def case_gradients_are_aggregated_locally() -> None:
    for call in CALLS:
        variables = [tf.Variable([1.0]), tf.Variable([2.0])]
        helper = hvd.LocalGradientAggregationHelper(
            2, lambda gradients, _: hvd.grouped_allreduce(gradients, op=hvd.Sum), False, True, hvd.rank(), "keras"
        )
        helper.register_local_var(variables[1])

        def step(number: Any, helper: Any = helper, variables: Any = tuple(variables)) -> Any:
            gradients = [number * (hvd.rank() + 1.0)] * 2
            found = helper.compute_gradients([*gradients, None], [*variables, None])
            pairs = list(zip(found[:2], variables, strict=True))

            def apply() -> None:
                for gradient, variable in pairs:
                    variable.assign_sub(gradient)

            helper.apply_gradients(apply, None, pairs)
            assert found[2] is None

        step = call(step)
        step(tf.constant([1.0]))
        check(variables, [[1.0], [2.0]])
        step(tf.constant([3.0]))
        # The mean of two passes is 2 · (rank + 1); the first is summed over ranks, the second divided by their number.
        check(variables, [[1.0 - 6.0], [2.0 - (hvd.rank() + 1)]])
    sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(ConfigError, match="sparse_as_dense=True"):
        helper.compute_gradients([sparse], [tf.Variable(tf.zeros([3, 2]))])
    with pytest.raises(ValueError, match="must be 1 or more"):
        hvd.LocalGradientAggregationHelper(0, lambda gradients, _: gradients, False, False, 0, "keras")


def case_partial_optimizer_keeps_local_gradients() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])
    for weight in model.weights:
        weight.assign(tf.ones(weight.shape))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=model.layers[0])
    gradients = [tf.fill(weight.shape, hvd.rank() + 1.0) for weight in model.trainable_weights]
    optimizer.apply(gradients, model.trainable_weights)
    local, shared = 1 - (hvd.rank() + 1) / 2, 1 - 1.5
    check(model.weights, [[[local]] * 2, [local], [[shared]], [shared]])


def case_branches_loops_and_functions_are_in_the_order_of_the_program() -> None:
    """Of which TensorFlow itself orders none that has a variable."""
    variable = tf.Variable(2.0)

    @tf.function
    def inner(value: Any) -> Any:
        return hvd.allreduce(value * variable)

    @tf.function
    def outer(value: Any, first: Any) -> list[Any]:
        results = [hvd.allreduce(value)]
        results.append(tf.cond(first, lambda: hvd.broadcast(value * variable, 0), lambda: value))
        results += tf.while_loop(lambda _: first, lambda each: [hvd.allreduce(each * variable)], [value])
        results.append(inner(value))
        return [*results, hvd.allreduce(value)]

    value, first = tf.constant([1.0 + hvd.rank()]), tf.constant(True)
    check(inner(value), [3.0])  # traced before
    kinds = ("EagerPyFunc", "If", "PyFunc", "StatefulPartitionedCall", "While")
    graph = outer.get_concrete_function(value, first).graph
    calls = [each for each in graph.get_operations() if each.type in kinds]
    assert len(calls) == 5
    for before, call in itertools.pairwise(calls):
        assert before in call.control_inputs, call.name
