"""Ranks that train alone for a while, then agree on weights: Local SGD and DiLoCo.

Between two exchanges a rank updates its weights as if there were no others. Then ranks exchange how far each has
come, the *outer gradient*, and an outer optimizer moves the weights they all had before. Two ranks, every = 3::

    rank 0    w ─► ─► ─► w0  ┐ w − w0 ┐                          ┌ w'' ─► …
                             ├────────┤ mean g, by examples      │
    rank 1    w ─► ─► ─► w1  ┘ w − w1 ┘  w' = outer step(w, g)  ─┴ w'' = w', on both

With an outer step of rate 1 and no momentum, w' is the mean of w0 and w1: Local SGD. The exchange is the
gradient reducer's, once in so many steps: its compression, its weights by examples, its ranks that join early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from choros.comm import ProcessSet, global_process_set
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.ops import broadcast_arrays
from choros.parallel.reduce.exchange import Array, layout_of
from choros.parallel.reduce.reducer import GradientReducer, ReduceConfig

__all__ = ["LocalUpdates", "OuterSGD"]


@dataclass(frozen=True)
class OuterSGD:
    """What is done with the mean outer gradient: SGD with momentum, as in PyTorch.

    The defaults are those of Local SGD (Stich 2019, https://arxiv.org/abs/1805.09767): weights are averaged.
    DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105) has ``OuterSGD(0.7, 0.9, nesterov=True)``.

    Attributes:
        learning_rate: how much of the way to the mean is gone.
        momentum: how much of the last steps is gone again.
        nesterov: whether the momentum is applied before the step it comes from is over.

    Raises:
        ConfigError: a rate that is not positive, a momentum outside 0 … 1, or Nesterov's without any.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"the outer learning rate {self.learning_rate} must be greater than 0.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"the outer momentum {self.momentum} must be at least 0 and less than 1.")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True needs an outer momentum greater than 0.")

    def velocity(self, velocity: Array, gradient: Array) -> Array:
        """The velocity after ``gradient``."""
        new: Array = velocity * velocity.dtype.type(self.momentum) + gradient
        return new

    def weight(self, weight: Array, velocity: Array, gradient: Array) -> Array:
        """The weight after a step with this new ``velocity``."""
        direction = gradient + velocity * velocity.dtype.type(self.momentum) if self.nesterov else velocity
        new: Array = weight - direction * weight.dtype.type(self.learning_rate)
        return new


@final
class LocalUpdates:
    """Lets a rank train alone and brings it together with the others every so many steps.

    All ranks call ``start`` with the same weights. Then each calls ``step`` for each of its steps, ``exchange``
    when that says so, and ``finish`` when it has no more; ranks may have different numbers of steps.

    Args:
        every: steps from one exchange to the next, 1 or more.
        outer: what is done with the mean of the outer gradients.
        compressor: how these travel.
        process_set: the ranks that train together.

    Raises:
        ConfigError: ``every`` is not a positive number.

    Example:
        >>> import choros
        >>> choros.init()
        >>> updates = LocalUpdates(every=2)
        >>> updates.start([np.zeros(2)])
        >>> updates.step(), updates.step()
        (False, True)
        >>> updates.exchange([np.ones(2)], examples=64)
        [array([1., 1.])]
    """

    def __init__(
        self,
        every: int,
        outer: OuterSGD = OuterSGD(),
        *,
        compressor: Compressor = Compression.none,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: there must be 1 step or more between exchanges.")
        self.every = every
        self.outer = outer
        self.process_set = process_set
        self._reducer = GradientReducer(ReduceConfig(compressor=compressor, process_set=process_set))
        self._steps = 0
        self._weights: list[Array] = []
        self._velocities: list[Array] = []

    def start(self, weights: Sequence[Array]) -> None:
        """Begins at ``weights``, the same on every rank; they are copied."""
        self._steps = 0
        self._weights = [np.array(weight) for weight in weights]
        self._velocities = [np.zeros_like(weight) for weight in self._weights]

    def step(self, steps: int = 1) -> bool:
        """Counts steps of this rank; whether an exchange is due."""
        self._steps += steps
        return self._steps >= self.every

    def exchange(self, weights: Sequence[Array], *, examples: int) -> list[Array]:
        """Agrees on new weights with the other ranks.

        Args:
            weights: this rank's, after its steps.
            examples: how many it has trained on since the last exchange, 1 or more.

        Returns:
            The weights to go on with, the same on every rank; new arrays.

        Raises:
            MismatchError: ranks have different weights.
        """
        outer_gradients = [shared - weight for shared, weight in zip(self._weights, weights, strict=True)]
        means = self._reducer.reduce(outer_gradients, examples=examples)
        self._velocities = [self.outer.velocity(*pair) for pair in zip(self._velocities, means, strict=True)]
        parts = zip(self._weights, self._velocities, means, strict=True)
        self._weights = [self.outer.weight(*part) for part in parts]
        self._steps = 0
        return self._copies()

    def finish(self, weights: Sequence[Array], *, examples: int) -> list[Array]:
        """Exchanges what is left and goes along with the ranks that have more steps, until none has.

        Args:
            weights: as for ``exchange``.
            examples: likewise; not looked at if there was no step since the last exchange.

        Returns:
            The weights of all ranks, the same on every rank; new arrays.
        """
        if self._steps:
            self.exchange(weights, examples=examples)
        last = self._reducer.join(layout_of(self._weights))
        if last is not None:
            state = [*self._weights, *self._velocities]
            names = [f"outer state {index} of {len(state)}" for index in range(len(state))]
            root = self.process_set.ranks[last]
            state = broadcast_arrays(state, root, names=names, process_set=self.process_set)
            self._weights, self._velocities = state[: len(weights)], state[len(weights) :]
        return self._copies()

    def _copies(self) -> list[Array]:
        """The shared weights for others to change."""
        return [weight.copy() for weight in self._weights]
