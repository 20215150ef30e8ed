"""Conversion between one framework's arrays and host arrays, in both directions; on one rank."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrays.frameworks import FRAMEWORK, dtype_name, dtypes, make
from choros.arrays import ArraySpec, adapter_of, framework_adapter
from choros.comm import BFLOAT16

import_module(FRAMEWORK)
#: Including other frameworks: TensorFlow loads JAX.
LOADED = set(sys.modules)
ADAPTER = framework_adapter(FRAMEWORK)
SHAPES = [(), (0,), (3, 0), (2, 3)]


def values(dtype: np.dtype, shape: tuple[int, ...] = (2, 3)) -> NDArray:
    return (np.arange(np.prod(shape)) % 3).reshape(shape).astype(dtype)


def special_arrays() -> dict[str, tuple[Any, NDArray]]:
    """The framework's array types beside plain arrays, with their values."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    if FRAMEWORK == "torch":
        torch = import_module("torch")
        tensor = torch.tensor(table.tolist())
        return {
            "parameter": (torch.nn.Parameter(tensor), table),
            "result that requires a gradient": (torch.nn.Parameter(tensor) * 2, table * 2),
            "transposed": (tensor.t(), table.T),
            "bfloat16, every other column": (tensor.to(torch.bfloat16)[:, ::2], table[:, ::2].astype(BFLOAT16)),
        }
    if FRAMEWORK == "tensorflow":
        tf = import_module("tensorflow")
        slices = tf.IndexedSlices(tf.constant(table), tf.constant([2, 0]), tf.constant([3, 3]))
        return {
            "variable": (tf.Variable(table), table),
            "IndexedSlices": (slices, np.stack([table[1], np.zeros(3, np.float32), table[0]])),
        }
    if FRAMEWORK == "jax":
        return {"transposed": (import_module("jax").numpy.asarray(table).T, table.T)}
    return {
        "list": (table.tolist(), table.astype(np.float64)),
        "number": (2, np.array(2)),
        "scalar": (table[1, 1],) * 2,
    }


def case_adapter_of_arrays_of_the_framework() -> None:
    assert adapter_of(make(values(np.dtype(np.float32)))) is ADAPTER


def case_round_trip_of_every_dtype_and_shape() -> None:
    for dtype in dtypes():
        for shape in SHAPES:
            host, array = values(dtype, shape), make(values(dtype, shape))
            assert ADAPTER.spec(array) == ArraySpec(shape, dtype)
            converted = ADAPTER.to_host(array)
            assert (converted.dtype, converted.shape) == (dtype, shape)
            np.testing.assert_array_equal(converted, host)
            back = ADAPTER.from_host(host, array)
            assert (dtype_name(back), tuple(back.shape), type(back)) == (dtype.name, shape, type(array))
            np.testing.assert_array_equal(ADAPTER.to_host(back), host)


def case_special_arrays_are_read_like_arrays() -> None:
    for name, (array, expected) in special_arrays().items():
        assert adapter_of(array) is ADAPTER, name
        assert ADAPTER.spec(array) == ArraySpec(expected.shape, expected.dtype), name
        np.testing.assert_array_equal(ADAPTER.to_host(array), expected, err_msg=name)


def case_host_arrays_may_be_read_only_and_strided() -> None:
    for dtype in dtypes():
        host = values(dtype, (4, 6))[::2, ::-1].T
        host.setflags(write=False)
        np.testing.assert_array_equal(ADAPTER.to_host(ADAPTER.from_host(host, make(host))), host)


def case_immutable_arrays_cannot_be_changed_through_host_arrays() -> None:
    if FRAMEWORK not in ("jax", "tensorflow"):
        return
    for dtype in dtypes():
        array = make(values(dtype))
        converted = ADAPTER.to_host(array)
        if converted.flags.writeable:  # it must be a copy
            converted[...] = 1
        np.testing.assert_array_equal(ADAPTER.to_host(array), values(dtype))


def case_arrays_on_the_cpu_are_not_copied() -> None:
    array = make(values(np.dtype(np.float32)))
    shared = np.shares_memory(ADAPTER.to_host(array), ADAPTER.to_host(array))
    assert shared == (FRAMEWORK != "tensorflow")


def case_choros_loads_no_other_framework() -> None:
    assert not {"tensorflow", "torch", "jax", "keras"} & (set(sys.modules) - LOADED)
