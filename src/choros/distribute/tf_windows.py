"""Convolutions and pooling of batches without rows, on TensorFlow's CPU, whose oneDNN kernels fail there.

A convolution returns a wrong shape, and the gradient of a maximum ends the process. In a replica without rows, Keras'
functions get a row of zeros instead, and their results are cut to none, with gradients that are zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["windows_of_any_rows"]


@contextmanager
def windows_of_any_rows() -> Iterator[None]:
    """A block in which Keras' convolutions and pooling take batches without rows."""
    if "keras" not in sys.modules or sys.modules.get("tensorflow") is None or not _on_cpu():
        yield
        return
    from choros.training.keras_internals import patched_windows

    with patched_windows(_of_any_rows):
        yield


def _on_cpu() -> bool:
    import keras

    from choros.training.device import tensorflow_gpu

    return keras.backend.backend() == "tensorflow" and tensorflow_gpu() is None


def _of_any_rows(own: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    import tensorflow as tf

    def of_no_rows() -> Any:
        # The sum of no rows is a row of zeros, and its gradient has no rows again.
        return own(tf.reduce_sum(inputs, 0, keepdims=True), *args, **kwargs)[:0]

    rows = inputs.shape[0]
    if rows is not None:
        return own(inputs, *args, **kwargs) if rows else of_no_rows()
    return tf.cond(tf.equal(tf.shape(inputs)[0], 0), of_no_rows, lambda: own(inputs, *args, **kwargs))
