"""A small network for real digits, in NumPy: the test model of compressions and local updates."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness import ROOT

HIDDEN, BATCH, TRAINING = 128, 64, 1280

Arrays = list[NDArray]


@functools.cache
def data() -> tuple[NDArray, NDArray]:
    digits = np.load(ROOT / "examples" / "digits.npz")
    order = np.random.default_rng(0).permutation(len(digits["labels"]))
    return (digits["images"][order] / 16).reshape(-1, 64).astype(np.float32), digits["labels"][order]


def batches(rank: int, size: int, epochs: int, seed: int = 0) -> Iterator[NDArray]:
    """Yields the indices of this rank's examples in each batch of ``BATCH`` training examples."""
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        for batch in generator.permutation(TRAINING).reshape(-1, BATCH):
            yield batch[rank::size]


def initial_weights() -> Arrays:
    generator = np.random.default_rng(1)
    shapes = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
    return [generator.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32) for shape in shapes]


def gradients(weights: Arrays, batch: NDArray) -> Arrays:
    """Returns the gradients of the mean cross-entropy of a network with one hidden layer."""
    first, first_bias, second, second_bias = weights
    x, y = (part[batch] for part in data())
    hidden = np.maximum(x @ first + first_bias, 0)
    logits = hidden @ second + second_bias
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = scores / scores.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= np.float32(len(y))
    below = error @ second.T * (hidden > 0)
    return [x.T @ below, below.sum(0), hidden.T @ error, error.sum(0)]


def accuracy(weights: Arrays) -> float:
    """Returns the accuracy on the test examples."""
    first, first_bias, second, second_bias = weights
    x, y = (part[TRAINING:] for part in data())
    logits = np.maximum(x @ first + first_bias, 0) @ second + second_bias
    return float((logits.argmax(axis=1) == y).mean())


@dataclass
class SGD:
    """Plain SGD with momentum, which updates ``weights`` in place."""

    weights: Arrays
    rate: float = 0.1
    momentum: float = 0.9
    velocities: Arrays = field(default_factory=list)

    def step(self, gradients: Arrays) -> None:
        self.velocities = self.velocities or [np.zeros_like(weight) for weight in self.weights]
        for weight, velocity, gradient in zip(self.weights, self.velocities, gradients, strict=True):
            velocity *= np.float32(self.momentum)
            velocity += gradient
            weight -= np.float32(self.rate) * velocity
