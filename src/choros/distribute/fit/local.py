"""Training where there is one replica: Keras' own."""

from __future__ import annotations

from typing import Any, final

from choros.distribute.fit.call import Call
from choros.distribute.fit.training import Training

__all__ = ["LocalTraining"]


@final
class LocalTraining(Training):
    """Makes the calls as they are; optimizers are Keras' own, and may be applied anywhere."""

    def variable_made(self, variable: Any) -> None:
        """Nothing."""

    def optimizer_made(self, optimizer: Any) -> None:
        """Nothing: the sum over one replica is what it has."""

    def model_made(self, model: Any) -> None:
        """Nothing."""

    def metric_made(self, metric: Any) -> None:
        """Nothing."""

    def checkpoint_made(self, checkpoint: Any) -> None:
        """Nothing."""

    def checkpoint_manager_made(self, manager: Any) -> None:
        """Nothing."""

    def compile(self, model: Any, call: Call) -> None:
        """As it is."""
        call.run()

    def fit(self, model: Any, call: Call) -> Any:
        """As it is."""
        return call.run()

    evaluate = fit
    predict = fit
    train_on_batch = fit
    test_on_batch = fit
    predict_on_batch = fit

    def save(self, model: Any, call: Call) -> None:
        """As it is."""
        call.run()

    save_weights = save
    export = save
