"""One framework's arrays and host memory, there and back; no other rank is needed."""

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
#: Among them other frameworks: TensorFlow loads JAX.
LOADED = set(sys.modules)
ADAPTER = framework_adapter(FRAMEWORK)
SHAPES = [(), (0,), (3, 0), (2, 3)]


def values(dtype: np.dtype, shape: tuple[int, ...] = (2, 3)) -> NDArray:
    return (np.arange(np.prod(shape)) % 3).reshape(shape).astype(dtype)


def relatives() -> dict[str, tuple[Any, NDArray]]:
    """What the framework has beside plain arrays, and its values."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    if FRAMEWORK == "torch":
        torch = import_module("torch")
        tensor = torch.tensor(table.tolist())
        return {
            "parameter": (torch.nn.Parameter(tensor), table),
            "result with a gradient": (torch.nn.Parameter(tensor) * 2, table * 2),
            "transposed": (tensor.t(), table.T),
            "bfloat16, every other column": (tensor.to(torch.bfloat16)[:, ::2], table[:, ::2].astype(BFLOAT16)),
        }
    if FRAMEWORK == "tensorflow":
        tf = import_module("tensorflow")
        slices = tf.IndexedSlices(tf.constant(table), tf.constant([2, 0]), tf.constant([3, 3]))
        return {
            "variable": (tf.Variable(table), table),
            "slices": (slices, np.stack([table[1], np.zeros(3, np.float32), table[0]])),
        }
    if FRAMEWORK == "jax":
        return {"transposed": (import_module("jax").numpy.asarray(table).T, table.T)}
    return {
        "list": (table.tolist(), table.astype(np.float64)),
        "number": (2, np.array(2)),
        "scalar": (table[1, 1],) * 2,
    }


def case_arrays_of_the_framework_find_its_adapter() -> None:
    assert adapter_of(make(values(np.dtype(np.float32)))) is ADAPTER


def case_every_dtype_and_shape_goes_there_and_back() -> None:
    for dtype in dtypes():
        for shape in SHAPES:
            host, array = values(dtype, shape), make(values(dtype, shape))
            assert ADAPTER.spec(array) == ArraySpec(shape, dtype)
            there = ADAPTER.to_host(array)
            assert (there.dtype, there.shape) == (dtype, shape)
            np.testing.assert_array_equal(there, host)
            back = ADAPTER.from_host(host, array)
            assert (dtype_name(back), tuple(back.shape), type(back)) == (dtype.name, shape, type(array))
            np.testing.assert_array_equal(ADAPTER.to_host(back), host)


def case_relatives_of_arrays_are_read_like_arrays() -> None:
    for name, (array, expected) in relatives().items():
        assert adapter_of(array) is ADAPTER, name
        assert ADAPTER.spec(array) == ArraySpec(expected.shape, expected.dtype), name
        np.testing.assert_array_equal(ADAPTER.to_host(array), expected, err_msg=name)


def case_host_arrays_may_be_read_only_and_lie_as_they_like() -> None:
    for dtype in dtypes():
        host = values(dtype, (4, 6))[::2, ::-1].T
        host.setflags(write=False)
        np.testing.assert_array_equal(ADAPTER.to_host(ADAPTER.from_host(host, make(host))), host)


def case_immutable_arrays_cannot_be_changed_through_the_host() -> None:
    if FRAMEWORK not in ("jax", "tensorflow"):
        return
    for dtype in dtypes():
        array = make(values(dtype))
        there = ADAPTER.to_host(array)
        if there.flags.writeable:  # a copy, then
            there[...] = 1
        np.testing.assert_array_equal(ADAPTER.to_host(array), values(dtype))


def case_arrays_on_the_cpu_are_not_copied() -> None:
    array = make(values(np.dtype(np.float32)))
    shared = np.shares_memory(ADAPTER.to_host(array), ADAPTER.to_host(array))
    assert shared == (FRAMEWORK != "tensorflow")


def case_choros_loads_no_other_framework() -> None:
    assert not {"tensorflow", "torch", "jax", "keras"} & (set(sys.modules) - LOADED)
