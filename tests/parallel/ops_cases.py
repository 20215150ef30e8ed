"""The collectives on one framework's arrays, but for what ``conformance_cases.py`` has; on two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import choros
from arrays.frameworks import FRAMEWORK, compiled, dtype_name, make
from choros.arrays import adapter_of
from choros.comm import BFLOAT16, Reduction
from choros.errors import ConfigError, MismatchError
from choros.parallel import ops
from choros.parallel.compression import Compression
from choros.topology import shard_range

#: Functions are called directly and compiled.
CALLS: list[Callable[..., Any]] = [lambda function: function, compiled]
FLOAT32 = np.dtype(np.float32)


def values(rank: int, dtype: np.dtype = FLOAT32, shape: tuple[int, ...] = (4, 3)) -> NDArray:
    return ((np.arange(np.prod(shape)) + 3 * rank) % 4).reshape(shape).astype(dtype)


def own_array(dtype: np.dtype = FLOAT32, shape: tuple[int, ...] = (4, 3)) -> Any:
    return make(values(choros.rank(), dtype, shape))


def check(result: Any, expected: NDArray) -> None:
    """Checks that ``result`` is an array of the framework with ``expected``'s shape, dtype and values."""
    assert type(result) is type(make(expected))
    assert (dtype_name(result), tuple(result.shape)) == (expected.dtype.name, expected.shape)
    np.testing.assert_array_equal(adapter_of(result).to_host(result), expected)


def case_alltoall_with_splits() -> None:
    splits = [3, 1] if choros.rank() else [0, 2]
    received = values(1)[:3] if choros.rank() == 0 else np.concatenate([values(0)[:2], values(1)[3:]])
    for call in CALLS[:1] if FRAMEWORK == "jax" else CALLS:
        for given in (splits, np.array(splits), make(np.array(splits, np.int32))):
            rows, counts = call(lambda x, s=given: ops.alltoall(x, s))(own_array())
            check(rows, received)
            check(counts, np.array([2, 1] if choros.rank() else [0, 3], np.int32))


def case_collectives_of_one_compiled_function_keep_their_order() -> None:
    # They do not depend on each other's results: only the order of the program determines which is first.
    function = compiled(lambda x: (ops.allgather(x), ops.allreduce(x, Reduction.SUM), ops.broadcast(x, 0)))
    for _ in range(5):
        gathered, total, first = function(own_array(shape=(2,)))
        check(gathered, np.concatenate([values(0, shape=(2,)), values(1, shape=(2,))]))
        check(total, values(0, shape=(2,)) + values(1, shape=(2,)))
        check(first, values(0, shape=(2,)))


def case_results_for_numbers_are_numbers() -> None:
    for result, expected in (
        (ops.allreduce(choros.rank()), 0.5),
        (ops.allreduce(choros.rank() + 1, Reduction.SUM), 3),
        (ops.allreduce(choros.rank() == 0, Reduction.MAX), True),
        (ops.allreduce(choros.rank() == 0, Reduction.MIN), False),
        (ops.allreduce(choros.rank() == 0), 0.5),
        (ops.broadcast(choros.rank() + 2.5, 1), 3.5),
    ):
        assert (result, type(result)) == (expected, type(expected))
    assert ops.allgather(choros.rank()).tolist() == [0, 1]
    number, listed = ops.grouped_allgather([choros.rank(), [1.5]])
    assert (number.tolist(), listed.tolist()) == ([0, 1], [1.5, 1.5])
    assert ops.allreduce([1, choros.rank()], Reduction.SUM).tolist() == [2, 1]


def case_values_of_an_iterator() -> None:
    for call in CALLS:
        (total,) = call(lambda x: ops.grouped_allreduce((each for each in [x]), Reduction.SUM))(own_array())
        check(total, values(0) + values(1))


def case_values_are_scaled_before_and_after() -> None:
    for call in CALLS:
        for dtype in (FLOAT32, BFLOAT16):
            scaled = call(lambda x: ops.allreduce(x, Reduction.SUM, prescale_factor=0.5, postscale_factor=4.0))
            check(scaled(own_array(dtype)), (2 * (values(0) + values(1))).astype(dtype))
    maximum = ops.allreduce(own_array(), Reduction.MAX, prescale_factor=-1.0)
    check(maximum, -np.minimum(values(0), values(1)))
    half = ops.allreduce(make(np.full(2, 1000, np.float16)), prescale_factor=1 / 3000, op=Reduction.SUM)
    check(half, np.full(2, 2 * np.float32(1 / 3)).astype(np.float16))
    check(ops.allreduce(make(np.full(2, 60000, np.float16))), np.full(2, 60000, np.float16))  # of which the sum is inf
    with pytest.raises(ConfigError, match=r"allreduce\(prescale_factor=None\): expected a number"):
        ops.allreduce(own_array(), prescale_factor=None)


def case_integers_are_scaled_in_float64_and_rounded_towards_zero() -> None:
    mine = np.array([7, -7], np.int32) * (choros.rank() + 1)
    for call in CALLS:
        for op, before, after, expected in (
            (Reduction.SUM, 0.5, 1.0, [3 + 7, -3 - 7]),
            (Reduction.SUM, 1.0, 0.5, [10, -10]),
            (Reduction.AVERAGE, 1.0, 3.0, [31, -31]),
            (Reduction.AVERAGE, 1.0, 1.0, [10, -10]),
            (Reduction.MAX, 1.5, 1.0, [21, -10]),
        ):
            result = call(
                lambda x, op=op, b=before, a=after: ops.allreduce(x, op, prescale_factor=b, postscale_factor=a)
            )(make(mine))
            check(result, np.array(expected, np.int32))


def case_grouped_values_are_scaled_and_compressed() -> None:
    third, integers = np.full(2, 1 / 3, np.float32), values(choros.rank(), np.dtype(np.int32))
    total = values(0) + values(1)
    for call in CALLS:
        scaled = call(
            lambda x, y: ops.grouped_allreduce([x, y], Reduction.SUM, prescale_factor=2.0, postscale_factor=0.5)
        )(own_array(), make(integers))
        check(scaled[0], total)
        check(scaled[1], total.astype(np.int32))
        mean = call(lambda x, y: ops.grouped_allreduce([x, y], compression=Compression.fp16))(
            make(third), make(integers)
        )
        check(mean[0], third.astype(np.float16).astype(np.float32))
        check(mean[1], (total // 2).astype(np.int32))


def case_arrays_of_a_group_have_dtypes_of_their_own() -> None:
    def arrays(rank: int) -> list[NDArray]:
        return [values(rank, np.dtype(np.int32)), values(rank, shape=(3, 2)), values(rank, BFLOAT16)]

    pairs = list(zip(arrays(0), arrays(1), strict=True))
    for call in CALLS:
        gathered = call(lambda *given: ops.grouped_allgather(given, name="all"))(*map(make, arrays(choros.rank())))
        scattered = call(lambda *given: ops.grouped_reducescatter(given, Reduction.SUM, postscale_factor=2.0))(
            *map(make, arrays(choros.rank()))
        )
        for whole, own, (first, second) in zip(gathered, scattered, pairs, strict=True):
            check(whole, np.concatenate([first, second]))
            rows = slice(*shard_range(len(first), choros.rank(), 2))
            check(own, (2 * (first + second)).astype(first.dtype)[rows])


def case_reducescatter_scales_and_compresses() -> None:
    third = np.full((2, 2), 1 / 3, np.float32)
    for call in CALLS:
        check(call(lambda x: ops.reducescatter(x, prescale_factor=4.0))(make(values(0))), 4 * values(0)[own_half(4)])
        rounded = third.astype(np.float16).astype(np.float32)[:1]
        check(call(lambda x: ops.reducescatter(x, compression=Compression.fp16))(make(third)), rounded)
        scaled = call(lambda x: ops.reducescatter(x, Reduction.SUM, postscale_factor=0.25))
        check(scaled(make(np.array([3, -3], np.int32))), np.array([-1 if choros.rank() else 1], np.int32))


def own_half(rows: int) -> slice:
    return slice(rows // 2, rows) if choros.rank() else slice(0, rows // 2)


def case_fp16_compression_rounds_values_and_keeps_the_dtype() -> None:
    third = np.full(2, 1 / 3, np.float32)
    for call in CALLS:
        result = call(lambda x: ops.allreduce(x, compression=Compression.fp16))(make(third))
        check(result, third.astype(np.float16).astype(np.float32))
        whole = call(lambda x: ops.allreduce(x, Reduction.SUM, compression=Compression.fp16))(
            own_array(np.dtype(np.int32))
        )
        check(whole, (values(0) + values(1)).astype(np.int32))
        same = call(lambda x: ops.allreduce(x, Reduction.ADASUM, compression=Compression.fp16))(make(third))
        check(same, third.astype(np.float16).astype(np.float32))


def case_root_is_a_global_rank_also_in_a_process_set() -> None:
    own = choros.add_process_set([1])
    if own.included():
        check(ops.broadcast(own_array(), 1, process_set=own), values(1))
        with pytest.raises(ConfigError, match=r"root_rank=0 is not one of the participating ranks \[1\]"):
            ops.broadcast(own_array(), 0, process_set=own)
    choros.remove_process_set(own)


def case_inputs_are_not_changed() -> None:
    array = own_array()
    for collective in (ops.allreduce, ops.allgather, ops.reducescatter, ops.alltoall, lambda x: ops.broadcast(x, 1)):
        collective(array)
        check(array, values(choros.rank()))


def case_arrays_of_different_shapes_mismatch() -> None:
    with pytest.raises(MismatchError, match=r"shape=\(4,\)"):
        ops.allreduce(own_array(shape=(4 + choros.rank(),)))


def case_limits_of_compiled_functions_are_errors() -> None:
    if FRAMEWORK == "jax":
        with pytest.raises(ConfigError, match="call the collective outside of jit"):
            compiled(lambda x: ops.alltoall(x, [2, 2]))(own_array())
    if FRAMEWORK == "tensorflow":
        tf = sys.modules["tensorflow"]
        with pytest.raises(ConfigError, match=r"pass jit_compile=False to model\.compile\(\) or tf\.function\(\)"):
            tf.function(ops.allreduce, jit_compile=True, autograph=False)(own_array())
        shapeless = tf.function(ops.allreduce, input_signature=[tf.TensorSpec(None)], autograph=False)
        with pytest.raises(ConfigError, match="number of dimensions"):
            shapeless(own_array())


def case_shapes_are_known_while_tensorflow_traces() -> None:
    if FRAMEWORK != "tensorflow":
        return
    tf = sys.modules["tensorflow"]
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def trace(x: Any) -> None:
        results = [ops.allreduce(x), ops.allgather(x), ops.broadcast(x, 0), ops.reducescatter(x), ops.alltoall(x)]
        shapes.extend(result.shape.as_list() for result in results)

    trace.get_concrete_function()
    assert shapes == [[None, 3]] * 5
