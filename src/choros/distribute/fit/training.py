"""The training interface: the methods of Keras models that were created in a strategy's scope."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from choros.distribute.fit.call import KerasCall

__all__ = ["Training"]


class Training(ABC):
    """Decides with which data and callbacks Keras' own methods are called.

    The …_created methods are hooks. All others receive the model and the user's call, and return the result for the
    user. The strategy's scope is open, except in the methods that write files.

    Attributes:
        follows_run: whether the hooks are also called in ``strategy.run``: for variables that the first call of a model
            creates there, and for optimizers of no scope that are applied there.
    """

    follows_run: ClassVar[bool] = False

    @abstractmethod
    def variable_created(self, variable: Any) -> None:
        """Called after a Keras variable is created; it may have no value yet."""

    @abstractmethod
    def optimizer_created(self, optimizer: Any) -> None:
        """Called while an optimizer is created; its own ``__init__`` may not have returned yet."""

    @abstractmethod
    def model_created(self, model: Any) -> None:
        """Called while a model is created, before it has any layers."""

    @abstractmethod
    def metric_created(self, metric: Any) -> None:
        """Called while a metric is created; its own ``__init__`` may not have returned yet."""

    def weight_added(self, weight: Any) -> None:  # noqa: B027
        """Called after a layer has created a variable of its own."""

    def seed_generator_created(self, generator: Any) -> None:  # noqa: B027  (not all need it)
        """Called after a ``keras.random.SeedGenerator`` is created."""

    def seed_generators_used(self) -> None:  # noqa: B027
        """Called when a scope is entered and before a replica runs: Keras' own generator may be new."""

    def combine_moments(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
        """Returns what combines the replicas' moments here, for a ``BatchNormalization(synchronized=True)``.

        ``None``: there are no other replicas, or the program is not in one.
        """
        return None

    @abstractmethod
    def compile(self, model: Any, call: KerasCall) -> None:
        """``model.compile``."""

    @abstractmethod
    def fit(self, model: Any, call: KerasCall) -> Any:
        """``model.fit`` on global batches; returns the history."""

    @abstractmethod
    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """``model.evaluate``: metrics over all examples, the same on every process."""

    @abstractmethod
    def predict(self, model: Any, call: KerasCall) -> Any:
        """``model.predict``: outputs for all examples in their order, on every process."""

    @abstractmethod
    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """``model.train_on_batch`` of a global batch."""

    @abstractmethod
    def test_on_batch(self, model: Any, call: KerasCall) -> Any:
        """``model.test_on_batch`` of a global batch."""

    @abstractmethod
    def predict_on_batch(self, model: Any, call: KerasCall) -> Any:
        """``model.predict_on_batch`` of a global batch."""

    @abstractmethod
    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Any function that writes files of a model or a checkpoint: one process writes those of ``path``.

        Returns:
            The result of ``write``; ``None`` if it is not known.
        """
