"""Local SGD and DiLoCo: ranks train independently for several steps, then average their progress.

Ranks reduce their *outer gradients*, the difference of their weights before and after these steps, by the gradient
reducer, and an outer optimizer updates the shared weights: with rate 1, no momentum, their mean. Every = 3::

    rank 0    w ─► ─► ─► w0  ┐ w − w0 ┐                          ┌ w'' ─► …
                             ├────────┤ mean g, by examples      │
    rank 1    w ─► ─► ─► w1  ┘ w − w1 ┘  w' = outer step(w, g)  ─┴ w'' = w', on both
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from choros.comm import Array, ProcessSet, global_process_set
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.ops import broadcast_arrays
from choros.parallel.reduce.gradients import layout_of
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer


@dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer, which applies the mean outer gradient: SGD with momentum, as in PyTorch. Its defaults
    average the weights: Local SGD (Stich 2019, arXiv:1805.09767). DiLoCo (Douillard et al. 2023, arXiv:2311.08105)
    uses ``OuterSGD(0.7, 0.9, nesterov=True)``.
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
        """Returns the velocity after ``gradient``."""
        new: Array = velocity * velocity.dtype.type(self.momentum) + gradient
        return new

    def weight(self, weight: Array, velocity: Array, gradient: Array) -> Array:
        """Returns the weight after a step with the updated ``velocity``."""
        direction = gradient + velocity * velocity.dtype.type(self.momentum) if self.nesterov else velocity
        new: Array = weight - direction * weight.dtype.type(self.learning_rate)
        return new


@final
class LocalUpdates:
    """Averages independently trained weights: ``start`` with equal ones, ``step``, ``exchange`` if due, ``finish``.

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
            raise ConfigError(f"every={every}: there must be 1 step or more between reductions.")
        self.every = every
        self.outer = outer
        self.process_set = process_set
        self._reducer = GradientReducer(ReduceConfig(compressor=compressor, process_set=process_set, of_rows=False))
        self._steps = 0
        self._weights: list[Array] = []
        self._velocities: list[Array] = []

    def start(self, weights: Sequence[Array]) -> None:
        """Starts from ``weights``, which are the same on every rank; they are copied."""
        self._steps = 0
        self._weights = [np.array(weight) for weight in weights]
        self._velocities = [np.zeros_like(weight) for weight in self._weights]

    def step(self, steps: int = 1) -> bool:
        """Counts ``steps`` steps of this rank; returns whether a reduction is due."""
        self._steps += steps
        return self._steps >= self.every

    def exchange(self, weights: Sequence[Array], *, examples: int) -> list[Array]:
        """Reduces all ranks' outer gradients, by ``examples`` since the last time; returns the new shared weights."""
        outer_gradients = [shared - weight for shared, weight in zip(self._weights, weights, strict=True)]
        means = self._reducer.reduce(outer_gradients, examples=examples)
        self._velocities = [self.outer.velocity(*pair) for pair in zip(self._velocities, means, strict=True)]
        updates = zip(self._weights, self._velocities, means, strict=True)
        self._weights = [self.outer.weight(*update) for update in updates]
        self._steps = 0
        return self._copies()

    def finish(self, weights: Sequence[Array], *, examples: int) -> list[Array]:
        """Reduces the last steps, then participates with zeros until no rank has more; returns the final weights."""
        if self._steps:
            self.exchange(weights, examples=examples)
        last = self._reducer.join(layout_of(self._weights))
        if last is not None:
            state = [*self._weights, *self._velocities]
            names = [f"outer state {index} of {len(state)}" for index in range(len(state))]
            root = self.process_set.ranks[last]
            state = broadcast_arrays(state, root, names=names, process_set=self.process_set, heirs=())
            self._weights, self._velocities = state[: len(weights)], state[len(weights) :]
        return self._copies()

    def state_dict(self) -> dict[str, Any]:
        """What another process needs to continue: the steps, the shared weights and the outer optimizer's state."""
        velocities = [velocity.copy() for velocity in self._velocities]
        return {"steps": self._steps, "weights": self._copies(), "velocities": velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a ``state_dict``."""
        self.start(state["weights"])
        self._steps = state["steps"]
        self._velocities = [np.array(velocity) for velocity in state["velocities"]]

    def _copies(self) -> list[Array]:
        return [weight.copy() for weight in self._weights]
