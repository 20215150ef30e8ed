"""How long training steps wait for their data, for the page of this rank: where Keras reads a batch, by framework."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import keras

from choros.observe.progress import page

#: On TensorFlow, when the last batch of a compiled step had arrived, in seconds since 1970.
_arrived: Any = None
#: The number of times that such a step was traced, which is not loading.
_traces = 0


def time_loading(model: Any) -> None:
    """Times what ``fit`` reads from now on, in the training function that it has made, or where torch reads it."""
    if keras.backend.backend() == "torch":
        from choros.data.data_loader import time_data_loaders

        time_data_loaders()
        return
    function: Callable[..., Any] | None = model.train_function
    if function is not None and not isinstance(function, functools.partial):
        model.train_function = functools.partial(_TIMED[keras.backend.backend()], function)


def note_arrival(data: Any) -> None:
    """Notes, in a compiled training step on TensorFlow, that its batch is there."""
    global _traces
    _traces += 1
    if _arrived is not None:
        import tensorflow as tf

        with tf.control_dependencies([each for each in tf.nest.flatten(data) if tf.is_tensor(each)]):
            _arrived.assign(tf.timestamp())


def _tensorflow(function: Callable[..., Any], iterator: Any) -> Any:
    global _arrived
    if _arrived is None:
        import tensorflow as tf

        with tf.init_scope(), tf.device("CPU:0"):
            _arrived = tf.Variable(0.0, trainable=False, dtype="float64", name="data_arrived")
    began, traces = time.time(), _traces
    done = function(iterator)
    if traces == _traces:
        page.loaded += max(0.0, float(_arrived.numpy()) - began)
    return done


def _jax(function: Callable[..., Any], state: Any, iterator: Any) -> Any:
    return function(state, _Timed(iterator))


_TIMED: dict[str, Callable[..., Any]] = {"tensorflow": _tensorflow, "jax": _jax}


@final
class _Timed(Iterator[Any]):
    """An iterator whose batches are waited for."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        with page.loading():
            return next(self._batches)
