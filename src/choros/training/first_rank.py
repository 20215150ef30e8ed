"""Callbacks that only rank 0 calls, because they write files or print: if it is lost, the next rank 0 goes on.

::

              rank 0                 rank 1, then 0                              rank 2, then 1
    epoch 1   writes a row           -                                           -
    epoch 2   kill -9                begins, in epoch 2; writes a row            -
    epoch 3                          writes a row                                -
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import keras

from choros.comm import global_process_set


def is_first() -> bool:
    """Whether this is rank 0 at present; not a new rank before the others have taken it in."""
    communicator = global_process_set.communicator
    return communicator.rank == 0 and not communicator.is_new


def _passed_on(hook: str) -> Callable[..., None]:
    def call(self: FirstRankCallback, *arguments: Any, **named: Any) -> None:
        self.pass_on(hook, *arguments, **named)

    return call


@final
class FirstRankCallback(keras.callbacks.Callback):
    """Calls ``callback`` on rank 0; a new rank 0 begins it (``CSVLogger`` adds), but not a ``BackupAndRestore``.

    >>> FirstRankCallback(keras.callbacks.CSVLogger("log.csv")).callback.filename
    'log.csv'
    """

    def __init__(self, callback: Any, verbose: Any = None) -> None:
        super().__init__()
        self.callback = callback
        self.async_safe = getattr(callback, "async_safe", False)
        self._verbose = verbose
        self._begun = False
        self._epoch: int | None = None

    def set_params(self, params: Any) -> None:
        """Passes them on."""
        super().set_params(params)
        self.callback.set_params(params if self._verbose is None else {**params, "verbose": self._verbose})

    def pass_on(self, hook: str, *arguments: Any, **named: Any) -> None:
        """Calls a method of the callback, if this is rank 0; before the first one those that it has missed."""
        is_epoch = hook == "on_epoch_begin"
        if is_epoch:
            self._epoch = arguments[0]
        if not is_first():
            return
        if not self._begun:
            self.callback.set_model(self.model)  # in which Keras' TensorBoard makes files
        if not self._begun and hook != "on_train_begin":
            go_on(self.callback)
            self.callback.on_train_begin()
            if self._epoch is not None and not is_epoch:
                self.callback.on_epoch_begin(self._epoch)
        self._begun = True
        getattr(self.callback, hook)(*arguments, **named)

    on_epoch_begin = _passed_on("on_epoch_begin")
    on_epoch_end = _passed_on("on_epoch_end")
    on_train_begin, on_train_end = _passed_on("on_train_begin"), _passed_on("on_train_end")
    on_test_begin, on_test_end = _passed_on("on_test_begin"), _passed_on("on_test_end")
    on_train_batch_begin, on_train_batch_end = _passed_on("on_train_batch_begin"), _passed_on("on_train_batch_end")
    on_test_batch_begin, on_test_batch_end = _passed_on("on_test_batch_begin"), _passed_on("on_test_batch_end")


def verbose_on_first_rank(callbacks: Sequence[Any]) -> Any:
    """Lets Keras' own ``verbose`` callbacks print on rank 0 alone, from the start of each epoch; put it before them."""
    own = [each for each in callbacks if type(each).__module__.partition(".")[0] == "keras"]
    levels = [(each, each.verbose) for each in own if hasattr(each, "verbose")]

    def set_levels(*_: Any, **__: Any) -> None:
        for each, level in levels:
            each.verbose = level if is_first() else 0

    return keras.callbacks.LambdaCallback(on_train_begin=set_levels, on_epoch_begin=set_levels)


def go_on(callback: Any) -> None:
    """Prepares a callback for training that has begun before: a log is added to, and a backup, now older, not read."""
    if isinstance(getattr(callback, "append", None), bool):
        callback.append = True
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        callback.on_train_begin = lambda _=None: None
