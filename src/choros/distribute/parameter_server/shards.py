"""What one parameter server holds: shards of variables, and the optimizers that change them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.distribute.parameter_server.messages import Adopt, Assign, Average, Changed, OptimizerRecipe, Pull, Push
from choros.distribute.parameter_server.placement import Shard, SlotKey
from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError
from choros.training.keras_internals import exclude_from_weight_decay, trained_variables

__all__ = ["Shards"]

Array = NDArray[Any]


@final
class Shards:
    """The shards of one server, and what may be asked of it. Every call sees all of the calls before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._changed: dict[Shard, int] = {}
        self._variables: dict[Shard, Any] = {}
        self._optimizers: dict[int, _Optimizer] = {}

    def assign(self, message: Assign) -> None:
        """Makes variables, or gives them other values."""
        import keras

        with self._lock:
            for shard, value in message.values.items():
                if shard in self._variables:
                    self._variables[shard].assign(value)
                else:
                    dtype = keras.backend.standardize_dtype(value.dtype)
                    # No gradients are computed here, and torch lets no integer be trainable.
                    self._variables[shard] = keras.Variable(value, dtype=dtype, trainable=False)
            self._touch(message.values)

    def adopt(self, message: Adopt) -> None:
        """Makes an optimizer, unless there is one of that number."""
        with self._lock:
            if message.optimizer not in self._optimizers:
                optimizer = _Optimizer(message.optimizer, message.recipe, self._variables)
                for shard, slot in optimizer.slots.items():
                    if shard in self._variables:
                        slot.assign(_copy(self._variables[shard]))
                self._variables.update(optimizer.slots)
                self._optimizers[message.optimizer] = optimizer

    def pull(self, message: Pull) -> Changed:
        """What changed since the version that the caller knows."""
        with self._lock:
            return self._since(message.known, slots=message.slots)

    def push(self, message: Push) -> Changed:
        """Applies gradients."""
        with self._lock:
            optimizer = self._optimizers[message.optimizer]
            optimizer.apply(message.gradients, message.learning_rate)
            self._touch([*message.gradients, *optimizer.slots])
            return self._since(message.known, slots=False)

    def average(self, message: Average) -> None:
        """Puts an optimizer's moving averages in the place of its variables."""
        with self._lock:
            if message.optimizer in self._optimizers:
                self._touch(self._optimizers[message.optimizer].average())

    def _touch(self, shards: Iterable[Shard]) -> None:
        self._version += 1
        for shard in shards:
            self._changed[shard] = self._version

    def _since(self, known: int, *, slots: bool) -> Changed:
        changed = [shard for shard, when in self._changed.items() if when > known]
        wanted = changed if slots else [shard for shard in changed if not isinstance(shard.variable, SlotKey)]
        return Changed(self._version, {shard: _copy(self._variables[shard]) for shard in wanted})


@final
class _Optimizer:
    """A real Keras optimizer of the shards that are here.

    Attributes:
        slots: what it keeps.
    """

    def __init__(self, number: int, recipe: OptimizerRecipe, variables: Mapping[Shard, Any]) -> None:
        order = list(recipe.variables)
        missing = set(order) - {shard.variable for shard in variables}
        self._shards = sorted(
            (shard for shard in variables if shard.variable in recipe.variables),
            key=lambda shard: (order.index(shard.variable), shard.begin),
        )
        if len(missing) == len(order):
            raise ConfigError(
                "an optimizer was applied to variables that no parameter server knows: build the model in the scope "
                "before the first schedule(), for example with keras.Input or model.build(shape)."
            )
        kind, config = pickle.loads(recipe.pickled)  # noqa: S301  (from a process that has proved its key)
        self._optimizer = kind.from_config(config)
        self._variables = [variables[shard] for shard in self._shards]
        without_decay = []
        for shard, variable in zip(self._shards, self._variables, strict=True):
            decays, variable.constraint = recipe.variables[shard.variable]
            if not decays:
                without_decay.append(variable)
        exclude_from_weight_decay(self._optimizer, without_decay)
        slots = Slots(self._optimizer)
        slots.build(self._variables, self._optimizer.build)
        shards = dict(zip(map(id, self._variables), self._shards, strict=True))
        self.slots = {_slot(number, index, shards.get(id(variable))): slot for index, variable, slot in slots}
        self._update = _compiled_update(self._optimizer)

    def apply(self, gradients: Mapping[Shard, Array], learning_rate: float | None) -> None:
        import keras

        if learning_rate is not None:
            self._optimizer.learning_rate = learning_rate
        convert = keras.ops.convert_to_tensor
        self._update([convert(gradients[shard]) if shard in gradients else None for shard in self._shards])

    def average(self) -> Sequence[Shard]:
        self._optimizer.finalize_variable_values(self._variables)
        return self._shards


def _slot(optimizer: int, index: int, of: Shard | None) -> Shard:
    if of is None:
        return Shard(SlotKey(optimizer, index))
    return replace(of, variable=SlotKey(optimizer, index, of.variable))


def _compiled_update(optimizer: Any) -> Callable[[list[Any]], None]:
    """``optimizer.apply``, compiled where the framework gains by it."""
    import keras

    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            return tf.function(optimizer.apply, autograph=False)  # type: ignore[no-any-return]
        case "jax":
            import jax

            stateless = jax.jit(optimizer.stateless_apply)

            def update(gradients: list[Any]) -> None:
                kept = [*trained_variables(optimizer), *optimizer.variables]
                own = [variable.value for variable in optimizer.variables]
                trained = [variable.value for variable in trained_variables(optimizer)]
                new, state = stateless(own, gradients, trained)
                for variable, value in zip(kept, [*new, *state], strict=True):
                    variable.assign(value)

            return update
        case _:
            import torch

            return torch.no_grad()(optimizer.apply)  # type: ignore[no-any-return]


def _copy(variable: Any) -> Array:
    """The value now, whatever happens to the variable next."""
    value = getattr(variable, "value", variable)
    return np.array(adapter_of(value).to_host(value))
