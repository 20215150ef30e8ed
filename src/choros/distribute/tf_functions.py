"""What functions of TensorFlow and Keras need to run in a replica: AutoGraph, and batches without rows.

AutoGraph converts what a ``tf.function`` calls, but no libraries; here it leaves out choros, too, as it does
TensorFlow's own strategies, which convert the functions of the user's that they are given.

TensorFlow's oneDNN kernels of convolutions and pooling, on the CPU, return wrong shapes of a batch without rows, or end
the process: Keras' functions get a row of zeros instead, and results are cut to none, with zero gradients. Keras'
``add`` takes what it adds for a bias if that has the static shape (0, n).
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
def batches_of_any_rows() -> Iterator[None]:
    """A block in which Keras' normalisations, additions, convolutions and pooling take batches without rows."""
    import keras

    from choros.training.device import tensorflow_gpu
    from choros.training.keras_internals.models import patched_operations, statistics_of_any_rows

    with ExitStack() as stack:
        stack.enter_context(statistics_of_any_rows())
        if keras.backend.backend() == "tensorflow":
            stack.enter_context(patched_operations(_add, _window if tensorflow_gpu() is None else None))
        yield


def _add(own: Callable[..., Any], x1: Any, x2: Any) -> Any:
    import keras

    # Of no numbers the sum is the difference.
    return keras.ops.subtract(x1, x2) if 0 in getattr(x2, "shape", ()) else own(x1, x2)


def _window(own: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    import tensorflow as tf

    def of_no_rows() -> Any:
        # The sum of no rows is a row of zeros, and its gradient has no rows again.
        return own(tf.reduce_sum(inputs, 0, keepdims=True), *args, **kwargs)[:0]

    rows = inputs.shape[0]
    if rows is not None:
        return own(inputs, *args, **kwargs) if rows else of_no_rows()
    return tf.cond(tf.equal(tf.shape(inputs)[0], 0), of_no_rows, lambda: own(inputs, *args, **kwargs))
