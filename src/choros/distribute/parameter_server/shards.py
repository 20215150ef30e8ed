"""The state of one parameter server: shards of variables, and the optimizers that update them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.distribute.parameter_server.messages import Assign, Average, Changed, OptimizerRecipe, Pull, Push, Register
from choros.distribute.parameter_server.placement import Shard, SlotKey
from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError
from choros.training.keras_internals import exclude_from_weight_decay, trained_variables

__all__ = ["Shards"]

Array = NDArray[Any]


@final
class Shards:
    """The shards of one server and the requests on them; calls are serialized by a lock.

    Attributes:
        compiled: whether the optimizers' updates are compiled; set it before optimizers are registered.
    """

    def __init__(self) -> None:
        self.compiled = True
        self._lock = threading.Lock()
        self._version = 0
        self._changed: dict[Shard, int] = {}
        self._variables: dict[Shard, Any] = {}
        self._optimizers: dict[int, _Optimizer] = {}

    def assign(self, message: Assign) -> None:
        """Assigns values to variables; creates those that do not exist."""
        import keras

        with self._lock:
            for shard, value in message.values.items():
                if shard in self._variables:
                    self._variables[shard].assign(value)
                else:
                    dtype = keras.backend.standardize_dtype(value.dtype)
                    # No gradients are computed here, and torch does not allow trainable integers.
                    self._variables[shard] = keras.Variable(value, dtype=dtype, trainable=False)
            self._touch(message.values)

    def register(self, message: Register) -> None:
        """Creates an optimizer, unless one with this number exists."""
        with self._lock:
            if message.optimizer not in self._optimizers:
                optimizer = _Optimizer(message.optimizer, message.recipe, self._variables, self.compiled)
                for shard, slot in optimizer.slots.items():
                    if shard in self._variables:
                        slot.assign(_copy(self._variables[shard]))
                self._variables.update(optimizer.slots)
                self._optimizers[message.optimizer] = optimizer

    def pull(self, message: Pull) -> Changed:
        """Returns the shards that changed since the version that the client knows."""
        with self._lock:
            return self._since(message.known, slots=message.slots)

    def push(self, message: Push) -> Changed:
        """Applies gradients; returns the shards that changed."""
        with self._lock:
            optimizer = self._optimizers[message.optimizer]
            optimizer.apply(message.gradients, message.learning_rate)
            self._touch([*message.gradients, *optimizer.slots])
            return self._since(message.known, slots=False)

    def average(self, message: Average) -> None:
        """Overwrites an optimizer's variables with their moving averages."""
        with self._lock:
            if message.optimizer in self._optimizers:
                self._touch(self._optimizers[message.optimizer].average())

    def _touch(self, shards: Iterable[Shard]) -> None:
        self._version += 1
        for shard in shards:
            self._changed[shard] = self._version

    def _since(self, known: int, *, slots: bool) -> Changed:
        changed = [shard for shard, version in self._changed.items() if version > known]
        requested = changed if slots else [shard for shard in changed if not isinstance(shard.variable, SlotKey)]
        return Changed(self._version, {shard: _copy(self._variables[shard]) for shard in requested})


@final
class _Optimizer:
    """A Keras optimizer of the shards that this server stores.

    Attributes:
        slots: its slots, by shard.
    """

    def __init__(self, number: int, recipe: OptimizerRecipe, variables: Mapping[Shard, Any], compiled: bool) -> None:
        order = list(recipe.variables)
        missing = set(order) - {shard.variable for shard in variables}
        self._shards = sorted(
            (shard for shard in variables if shard.variable in recipe.variables),
            key=lambda shard: (order.index(shard.variable), shard.begin),
        )
        if len(missing) == len(order):
            raise ConfigError(
                "an optimizer was applied to variables that no parameter server stores: build the model in the scope "
                "before the first schedule(), for example with keras.Input or model.build(shape)."
            )
        kind, config = pickle.loads(recipe.pickled)  # noqa: S301  (from an authenticated process)
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
        self._update = _update_of(self._optimizer, compiled)

    def apply(self, gradients: Mapping[Shard, Array], learning_rate: float | None) -> None:
        import keras

        if learning_rate is not None:
            self._optimizer.learning_rate = learning_rate
        convert = keras.ops.convert_to_tensor
        self._update([convert(gradients[shard]) if shard in gradients else None for shard in self._shards])

    def average(self) -> Sequence[Shard]:
        self._optimizer.finalize_variable_values(self._variables)
        return self._shards


def _slot(optimizer: int, index: int, parent: Shard | None) -> Shard:
    if parent is None:
        return Shard(SlotKey(optimizer, index))
    return replace(parent, variable=SlotKey(optimizer, index, parent.variable))


def _update_of(optimizer: Any, compiled: bool) -> Callable[[list[Any]], None]:
    """Returns ``optimizer.apply``, compiled for the frameworks that profit from it."""
    import keras

    framework = keras.backend.backend()
    if not compiled and framework != "torch":
        return optimizer.apply  # type: ignore[no-any-return]
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return tf.function(optimizer.apply, autograph=False)  # type: ignore[no-any-return]
        case "jax":
            import jax

            stateless = jax.jit(optimizer.stateless_apply)

            def update(gradients: list[Any]) -> None:
                variables = [*trained_variables(optimizer), *optimizer.variables]
                own = [variable.value for variable in optimizer.variables]
                trained = [variable.value for variable in trained_variables(optimizer)]
                new, state = stateless(own, gradients, trained)
                for variable, value in zip(variables, [*new, *state], strict=True):
                    variable.assign(value)

            return update
        case _:
            import torch

            return torch.no_grad()(optimizer.apply)  # type: ignore[no-any-return]


def _copy(variable: Any) -> Array:
    """Returns a copy of the current value, independent of later changes of the variable."""
    value = getattr(variable, "value", variable)
    return np.array(adapter_of(value).to_host(value))
