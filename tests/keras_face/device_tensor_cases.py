"""A collective on devices receives the memory of TensorFlow's tensors, and its result becomes TensorFlow's again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

import choros.keras as hvd
from choros.arrays import ArraySpec, framework_adapter
from choros.comm import Reduction
from choros.training.distributed_optimizer import reducer_of
from keras_face.training_cases import OPTIMIZERS

ADAPTER = framework_adapter("tensorflow")


def case_gradients_are_reduced_where_they_are() -> None:
    assert reducer_of(hvd.DistributedOptimizer(OPTIMIZERS["adam"]())).reducer.config.device == torch.device("cpu")
    collectives = hvd.global_process_set.communicator.devices
    given: list[Any] = []

    def summed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given.extend(tensors)
        copies = [tensor.clone() for tensor in tensors]
        for copy in copies:
            collectives.allreduce(copy, Reduction.SUM)
        return copies

    for dtype in ("float32", "float16", "bfloat16", "int64"):
        array = tf.cast(tf.reshape(tf.range(6), (2, 3)), dtype) + hvd.rank()
        spec = ArraySpec((2, 3), np.dtype(array.dtype.as_numpy_dtype))
        expected = np.arange(6).reshape(2, 3) * 2 + 1
        (eager,) = ADAPTER.device_call(summed, [array], [spec])
        np.testing.assert_array_equal(tf.cast(eager, "int64"), expected)
        (traced,) = tf.function(lambda x, spec=spec: ADAPTER.device_call(summed, [x], [spec]))(array)
        assert (traced.dtype, traced.shape) == (array.dtype, (2, 3))
        np.testing.assert_array_equal(tf.cast(traced, "int64"), expected)
        np.testing.assert_array_equal(tf.cast(array, "int64"), np.arange(6).reshape(2, 3) + hvd.rank())
    odd = ADAPTER.from_torch(torch.arange(9.0)[3:])  # not aligned
    np.testing.assert_array_equal(tf.square(odd), np.arange(3.0, 9.0) ** 2)
    assert all(isinstance(tensor, torch.Tensor) for tensor in given)
