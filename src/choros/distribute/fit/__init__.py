"""What the methods of a Keras model do that was made in a strategy's scope: one module a way of training."""

from choros.distribute.fit.training import Training

__all__ = ["Training"]
