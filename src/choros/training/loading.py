"""How long training steps wait for their data, for the page of this rank: where Keras reads a batch, by framework."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from choros.observe.progress import page

_END = object()


def time_loading(model: Any) -> None:
    """Times what ``fit`` reads in the epoch that begins, in the training function that it has made, or where torch
    reads it. The pause before the epoch ends, on TensorFlow at the first batch: there, a new iterator takes long.
    """
    backend = keras.backend.backend()
    own: Callable[..., Any] | None = model.train_function
    if backend == "torch":
        from choros.data.data_loader import time_data_loaders

        time_data_loaders()
    elif own is not None and not hasattr(own, "times"):
        function: Any = _timed_tensorflow(own) if backend == "tensorflow" else _timed_jax(own)
        function.times = own
        model.train_function = function
    if backend != "tensorflow" or own is None:
        page.end_pause()


def _timed_tensorflow(own: Callable[..., Any]) -> Callable[..., Any]:
    from choros.training.tensorflow_iterators import TimedIterator, end_in_background, loaded

    end_in_background()
    total = loaded()
    seen = float(total.numpy())
    given: Any = None
    timed: Any = None

    def function(iterator: Any) -> Any:
        nonlocal seen, given, timed
        if iterator is not given:
            given, timed = iterator, TimedIterator.of(iterator)  # the last one ends: up to 0.3 s
            page.end_pause()
        done = own(timed)
        before, seen = seen, float(total.numpy())
        page.loaded += seen - before
        return done

    return function


def _timed_jax(own: Callable[..., Any]) -> Callable[..., Any]:
    def batches(iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with page.loading():
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    return lambda state, iterator: own(state, batches(iterator))
