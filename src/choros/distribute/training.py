"""The training interface: the methods of Keras models that were created in a strategy's scope."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, final


class Training:
    """Calls Keras' own methods as the user did; a subclass decides with which data and callbacks.

    The …_created methods are hooks. All others receive the model and the user's call, and return the result for the
    user: here, that of Keras' own method. The strategy's scope is open, except in the methods that write files.

    Attributes:
        follows_run: whether the hooks are also called in ``strategy.run``: for variables that the first call of a model
            creates there, and for optimizers of no scope that are applied there.
    """

    follows_run: ClassVar[bool] = False

    def variable_created(self, variable: Any) -> None:
        """Called after a Keras variable is created; it may have no value yet."""

    def optimizer_created(self, optimizer: Any) -> None:
        """Called while an optimizer is created; its own ``__init__`` may not have returned yet."""

    def model_created(self, model: Any) -> None:
        """Called while a model is created, before it has any layers."""

    def metric_created(self, metric: Any) -> None:
        """Called while a metric is created; its own ``__init__`` may not have returned yet."""

    def weight_added(self, weight: Any) -> None:
        """Called after a layer has created a variable of its own."""

    def follow_seeds(self, generator: Any = None) -> None:
        """Called after a ``keras.random.SeedGenerator`` is created. Without one, when a scope is entered and before a
        replica runs: Keras' own generator, for functions without a seed, may be new.
        """

    def combine_moments(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
        """Returns what combines the replicas' moments here, for a ``BatchNormalization(synchronized=True)``.

        ``None``: there are no other replicas, or the program is not in one.
        """
        return None

    def compile(self, model: Any, call: KerasCall) -> None:
        """``model.compile``."""
        call.run()

    def fit(self, model: Any, call: KerasCall) -> Any:
        """``model.fit`` on global batches; returns the history."""
        return call.run()

    #: ``model.evaluate``: metrics over all examples, the same on every process.
    evaluate = fit
    #: ``model.predict``: outputs for all examples in their order, on every process.
    predict = fit
    #: ``model.train_on_batch``, ``test_on_batch`` and ``predict_on_batch`` of a global batch.
    train_on_batch = test_on_batch = predict_on_batch = fit

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Any function that writes files of a model or a checkpoint: one process writes those of ``path``.

        Returns:
            The result of ``write``; ``None`` if it is not known.
        """
        return write()


@final
class KerasCall:
    """A call of one of Keras' methods, whose arguments can be replaced before it is run.

    >>> call = KerasCall(lambda x, batch_size=32: (x, batch_size), (1,), {})
    >>> call["batch_size"], call.replaced(x=2).run()
    (32, (2, 32))
    """

    def __init__(
        self, method: Callable[..., Any], args: Any, kwargs: Any, named: Callable[..., Any] | None = None
    ) -> None:
        self._method, self._named = method, named or method  # ``named`` has the names of the arguments
        self.bound = inspect.signature(self._named).bind(*args, **kwargs)
        self.bound.apply_defaults()

    def __getitem__(self, name: str) -> Any:
        return self.bound.arguments[name]

    def get(self, name: str) -> Any:
        """Returns an argument; ``None`` if the method does not have it."""
        return self.bound.arguments.get(name)

    def replaced(self, **arguments: Any) -> KerasCall:
        """Returns the same call with other ``arguments``."""
        call = KerasCall(self._method, self.bound.args, self.bound.kwargs, self._named)
        call.bound.arguments.update(arguments)
        return call

    def run(self) -> Any:
        """Calls the method."""
        return self._method(*self.bound.args, **self.bound.kwargs)
