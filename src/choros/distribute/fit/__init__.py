"""Training of Keras models that were created in a strategy's scope: one module per way of training."""

from choros.distribute.fit.training import Training

__all__ = ["Training"]
