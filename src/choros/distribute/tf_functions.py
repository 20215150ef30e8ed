"""What TensorFlow's functions need to run in a replica: AutoGraph, and batches without rows.

AutoGraph converts what a ``tf.function`` calls, but no libraries; here it leaves out choros, too, as it does
TensorFlow's own strategies, which convert the functions of the user's that they are given.

TensorFlow's oneDNN kernels of convolutions and pooling, on the CPU, return wrong shapes of a batch without rows, or end
the process: Keras' functions get a row of zeros instead, and results are cut to none, with zero gradients.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def leave_unconverted() -> None:
    """Keeps AutoGraph, if TensorFlow is loaded, from converting functions of choros."""
    if sys.modules.get("tensorflow") is not None:
        _add_rule()


@functools.cache
def _add_rule() -> None:
    import tensorflow  # noqa: F401  (waits if another thread is importing it: parts of it, imported meanwhile, deadlock)
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("choros"), *config.CONVERSION_RULES)


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the user's as AutoGraph converts it in the ``tf.function`` that is being traced, if any."""
    if sys.modules.get("tensorflow") is None:
        return function
    import tensorflow as tf

    if tf.executing_eagerly():
        return function
    autograph = tf.__internal__.autograph
    result: Callable[..., Any] = autograph.tf_convert(
        function, autograph.control_status_ctx(), convert_by_default=False
    )
    return result


@contextmanager
def windows_of_any_rows() -> Iterator[None]:
    """A block in which Keras' convolutions and pooling take batches without rows."""
    if "keras" not in sys.modules or not _on_cpu():
        yield
        return
    from choros.training.keras_internals.models import patched_windows

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
