"""Collectives on devices reduce TensorFlow's tensors where they are, and need no PyTorch unless it moves the bytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf

import choros.keras as hvd
from choros.arrays import ArraySpec, device_adapter
from choros.comm import Communicator, Reduction
from choros.comm.communicator import bytes_of_first
from choros.comm.devices import Device, DeviceCollectives, DeviceLink, agree_to_connect
from choros.errors import EngineError, MismatchError
from choros.parallel.reduce.plan import device_exchange
from choros.training.distributed_optimizer import reducer_of
from keras_face import training_cases
from keras_face.training_cases import OPTIMIZERS

ADAPTER = device_adapter("tensorflow")
CPU = Device("cpu", framework="tensorflow")


def reduces_on_cpu() -> bool:
    return reducer_of(hvd.DistributedOptimizer(OPTIMIZERS["adam"]())).reducer.config.device == CPU


def exchanged(
    arrays: Sequence[Any] | None, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], **how: Any
) -> Any:
    """The ranks' arrays, reduced as the reducer does, eagerly and in a ``tf.function``; both give the same."""
    communicator = hvd.global_process_set.communicator
    layout = tuple(zip(shapes, (tf.as_dtype(dtype).as_numpy_dtype for dtype in dtypes), strict=True))
    layout = tuple((shape, np.dtype(dtype)) for shape, dtype in layout)
    wire: Callable[[Any], Any] = how.get("wire", lambda dtype: dtype)
    exchange = device_exchange(communicator, layout, [list(range(len(layout)))], wire, CPU)

    def on_device(tensors: Sequence[Any]) -> list[Any]:
        with communicator.exclusive():
            own = None if arrays is None else list(tensors)
            return exchange.sum(own, how.get("before", 1.0), how.get("after", 1.0))

    given = [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)] if arrays is None else arrays
    outputs = [ArraySpec(*each) for each in layout]
    eager = ADAPTER.device_call(on_device, given, outputs)
    traced = tf.function(lambda *tensors: ADAPTER.device_call(on_device, tensors, outputs))(*given)
    for one, other, (shape, dtype) in zip(eager, traced, layout, strict=True):
        np.testing.assert_array_equal(one, other)
        assert (other.dtype, tuple(other.shape)) == (tf.as_dtype(dtype), shape)
    return eager


def case_gradients_are_reduced_where_they_are() -> None:
    assert reduces_on_cpu()
    rank = hvd.rank()
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        array = tf.cast(tf.reshape(tf.range(6), (2, 3)), dtype) + rank
        (result,) = exchanged([array], [dtype], [(2, 3)])
        np.testing.assert_array_equal(tf.cast(result, "int64"), np.arange(6).reshape(2, 3) * 2 + 1)
        np.testing.assert_array_equal(tf.cast(array, "int64"), np.arange(6).reshape(2, 3) + rank)  # not overwritten
    arrays = [tf.fill((3,), 1.0 + rank), tf.zeros((0, 2)), tf.constant(5.0, "float64"), tf.ones((2, 2), "float16")]
    dtypes, shapes = ["float32", "float32", "float64", "float16"], [(3,), (0, 2), (), (2, 2)]
    results = exchanged(arrays, dtypes, shapes, before=0.5, after=3.0)
    for result, expected in zip(results, ([4.5] * 3, np.zeros((0, 2)), 15.0, np.full((2, 2), 3.0)), strict=True):
        np.testing.assert_array_equal(result, expected)
    results = exchanged(arrays if rank else None, dtypes, shapes)  # rank 0 has joined
    np.testing.assert_array_equal(results[0], [2.0] * 3)
    assert exchanged([tf.zeros((0,))], ["float32"], [(0,)])[0].shape == (0,)


def case_weights_are_not_rounded_to_a_narrow_dtype() -> None:
    share = 1 / 3 if hvd.rank() else 2 / 3  # in bfloat16 their sum is 1.002
    (result,) = exchanged([tf.fill((1,), tf.cast(256.0, "bfloat16"))], ["bfloat16"], [(1,)], before=share)
    assert float(result[0]) == 256.0
    half = np.dtype(np.float16)
    (result,) = exchanged([tf.fill((1,), 1e5)], ["float32"], [(1,)], before=0.25, wire=lambda dtype: half)
    np.testing.assert_allclose(result, [5e4], rtol=1e-3)  # 1e5 would overflow float16


class HostLink(DeviceLink):
    """What NCCL does on a GPU, in host memory through the control plane: reads and overwrites what DLPack gives."""

    def __init__(self, control: Communicator, device: Device) -> None:
        agree_to_connect(control, device, "a test", None)
        self.control = control
        self.reduced = 0

    def allreduce(self, buffer: Any, op: Reduction) -> None:
        values = np.from_dlpack(buffer)
        total = self.control.allreduce(values, op)
        ctypes.memmove(values.ctypes.data, total.ctypes.data, total.nbytes)
        self.reduced += 1

    def broadcast(self, tensor: Any, root: int) -> None:
        raise NotImplementedError

    def allgatherv(self, tensor: Any, received: Any, counts: Sequence[int]) -> None:
        raise NotImplementedError

    def alltoallv(self, tensor: Any, received: Any, send: Sequence[int], receive: Sequence[int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def case_training_without_pytorch() -> None:
    communicator = hvd.global_process_set.communicator
    links: list[HostLink] = []

    def connect(device: Device) -> DeviceLink:
        links.append(HostLink(communicator, device))
        return links[-1]

    collectives = DeviceCollectives(communicator, ("cpu",), connect)
    with patch.dict(communicator.__dict__, {"devices": collectives}), patch.dict(sys.modules, {"torch": None}):
        assert reduces_on_cpu()
        training_cases.case_adam_with_global_clipnorm_on_uneven_batches()
        training_cases.case_ranks_with_different_numbers_of_batches()
        keras.backend.clear_session()
    (link,) = links
    assert link.reduced > 20


def case_the_id_of_nccl_reaches_all_ranks() -> None:
    communicator, own = hvd.global_process_set.communicator, bytes(range(128)) if hvd.rank() == 0 else b"not asked"
    made = bytes_of_first(communicator, lambda: own, "the start of NCCL")
    assert made == bytes(range(128))

    def fails() -> bytes:
        raise OSError("no libnccl.so.2")

    error = EngineError if hvd.rank() == 0 else MismatchError
    with pytest.raises(error, match=r"the start of NCCL has failed: no libnccl.so.2"):
        bytes_of_first(communicator, fails, "the start of NCCL")
