"""How long training steps wait for their data, for the page of this rank: where Keras reads a batch, by framework."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import keras

from choros.observe.progress import page

_END = object()


def time_loading(model: Any) -> None:
    """Times what ``fit`` reads in the epoch that begins, in the training function that it has made, or where torch
    reads it. The pause before the epoch ends, on TensorFlow at the first batch: there, a new iterator takes long.
    """
    backend = keras.backend.backend()
    function: Callable[..., Any] | None = model.train_function
    if backend == "tensorflow" and function is not None:
        model.train_function = function if isinstance(function, _TensorFlow) else _TensorFlow(function)
        return
    page.end_pause()
    if backend == "torch":
        from choros.data.data_loader import time_data_loaders

        time_data_loaders()
    elif backend == "jax" and function is not None and not isinstance(function, functools.partial):
        model.train_function = functools.partial(_jax, function)


@final
class _TensorFlow:
    """A training function of TensorFlow whose iterator is timed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        from choros.training.tensorflow_iterators import TimedIterator, end_in_background, loaded

        end_in_background()
        self._function, self._timed, self._loaded = function, TimedIterator.of, loaded()
        self._given: Any = None
        self._iterator: Any = None
        self._seen = float(self._loaded.numpy())

    def __call__(self, iterator: Any) -> Any:
        if iterator is not self._given:
            self._given, self._iterator = iterator, self._timed(iterator)  # the last one ends: up to 0.3 s
            page.end_pause()
        done = self._function(self._iterator)
        seen = float(self._loaded.numpy())
        page.loaded, self._seen = page.loaded + seen - self._seen, seen
        return done


def _jax(function: Callable[..., Any], state: Any, iterator: Any) -> Any:
    return function(state, _timed(iterator))


def _timed(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches that are waited for."""
    while True:
        with page.loading():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch
