"""What the methods of a Keras model do that was made in a strategy's scope."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from choros.distribute.fit.call import Call

__all__ = ["Training"]


class Training(ABC):
    """Decides with what data and which callbacks Keras' own methods are called.

    All methods whose names are not …_made get the model and the call that the user made, and return what the user gets.
    The strategy's scope is open, except for those that write.
    """

    @abstractmethod
    def variable_made(self, variable: Any) -> None:
        """A Keras variable was made; its value may be yet to come."""

    @abstractmethod
    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer is being made: its own ``__init__`` may not be through yet."""

    @abstractmethod
    def model_made(self, model: Any) -> None:
        """A model is being made: nothing of it is there yet."""

    @abstractmethod
    def metric_made(self, metric: Any) -> None:
        """A metric is being made: its own ``__init__`` may not be through yet."""

    @abstractmethod
    def checkpoint_made(self, checkpoint: Any) -> None:
        """A ``tf.train.Checkpoint`` was made."""

    @abstractmethod
    def checkpoint_manager_made(self, manager: Any) -> None:
        """A ``tf.train.CheckpointManager`` was made."""

    @abstractmethod
    def compile(self, model: Any, call: Call) -> None:
        """``model.compile``."""

    @abstractmethod
    def fit(self, model: Any, call: Call) -> Any:
        """``model.fit`` on global batches; returns the history."""

    @abstractmethod
    def evaluate(self, model: Any, call: Call) -> Any:
        """``model.evaluate``: metrics over all examples, the same on every process."""

    @abstractmethod
    def predict(self, model: Any, call: Call) -> Any:
        """``model.predict``: outputs for all examples in their order, on every process."""

    @abstractmethod
    def train_on_batch(self, model: Any, call: Call) -> Any:
        """``model.train_on_batch`` of a global batch."""

    @abstractmethod
    def test_on_batch(self, model: Any, call: Call) -> Any:
        """``model.test_on_batch`` of a global batch."""

    @abstractmethod
    def predict_on_batch(self, model: Any, call: Call) -> Any:
        """``model.predict_on_batch`` of a global batch."""

    @abstractmethod
    def save(self, model: Any, call: Call) -> None:
        """``model.save``: one process writes."""

    @abstractmethod
    def save_weights(self, model: Any, call: Call) -> None:
        """``model.save_weights``: one process writes."""

    @abstractmethod
    def export(self, model: Any, call: Call) -> None:
        """``model.export``: one process writes."""
