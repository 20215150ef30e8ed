"""What scripts with a training step of their own share: a gradient and an update, as on keras.io."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras

from others.roads import BACKEND

__all__ = ["OwnStep", "minimize", "pure_call"]


def minimize(loss_on: Callable[[], Any], weights: Sequence[Any], optimizer: Any) -> Any:
    """Makes one update on TensorFlow or PyTorch; returns the loss."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_on()
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss
    import torch

    loss = loss_on()
    gradients = torch.autograd.grad(loss, [weight.value for weight in weights])
    with torch.no_grad():
        optimizer.apply(gradients, weights)
    return loss.detach()


def pure_call(network: keras.Model, weights: Any, inputs: Any) -> Any:
    """Returns what a network without other variables computes with these weights, on JAX."""
    return network.stateless_call(weights, [], inputs, training=True)[0]


class OwnStep(keras.Model):
    """A model with a ``train_step``, which computes its loss itself and keeps a metric of it."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    @abstractmethod
    def loss_of(self, data: Any) -> Any:
        """Returns the loss of a batch; on TensorFlow it may be a number for each row, whose sum is then minimized."""

    def after_update(self) -> None:
        """Is called with the weights after an update."""

    def train_step(self, *args: Any) -> Any:
        if BACKEND == "jax":
            return self._pure_step(*args)
        loss = minimize(lambda: self.loss_of(args[0]), self.trainable_variables, self.optimizer)
        self.after_update()
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _pure_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, moments, metrics = state

        def loss_on(trainable: Any, others: Any) -> Any:
            with self._values(trainable, others):
                return self.loss_of(data)

        loss, gradients = jax.value_and_grad(loss_on)(trainable, others)
        trainable, moments = self.optimizer.stateless_apply(moments, gradients, trainable)
        with self._values(trainable, others) as scope:
            self.after_update()
        others = [scope.get_current_value(each) for each in self.non_trainable_variables]
        metrics = self.loss_tracker.stateless_update_state(metrics, loss)
        return {"loss": self.loss_tracker.stateless_result(metrics)}, (trainable, others, moments, metrics)

    def _values(self, trainable: Any, others: Any) -> keras.StatelessScope:
        variables = [*self.trainable_variables, *self.non_trainable_variables]
        return keras.StatelessScope(list(zip(variables, [*trainable, *others], strict=True)))
