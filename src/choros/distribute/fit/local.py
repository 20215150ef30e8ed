"""Training on one replica: Keras' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from choros.distribute.fit.call import KerasCall
from choros.distribute.fit.training import Training

__all__ = ["LocalTraining"]


@final
class LocalTraining(Training):
    """Runs Keras' own methods; optimizers are not patched, and may be applied anywhere."""

    def variable_created(self, variable: Any) -> None:
        """Does nothing."""

    def optimizer_created(self, optimizer: Any) -> None:
        """Does nothing: the sum over one replica is its own gradient."""

    def model_created(self, model: Any) -> None:
        """Does nothing."""

    def metric_created(self, metric: Any) -> None:
        """Does nothing."""

    def compile(self, model: Any, call: KerasCall) -> None:
        """Runs Keras' own method."""
        call.run()

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Runs Keras' own method."""
        return call.run()

    evaluate = fit
    predict = fit
    train_on_batch = fit
    test_on_batch = fit
    predict_on_batch = fit

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Writes."""
        return write()
