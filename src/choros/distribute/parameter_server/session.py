"""A process's part in a ParameterServer job: its copy of the variables, and what it says about them to the servers.

::

    chief                                   servers                              worker
    publish: values that changed here ────► Assign
                                            Changed ──────────────► pull: before each function that it runs
                                            Push    ◄────────────── push: an optimizer's apply, in that function
                                            Assign  ◄────────────── push_statistics: after it, such as batch norm's
    pull: when all functions are done ◄──── Changed

A model's variables are cut and placed when all of them are there; every process comes to the same plan by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.distribute.parameter_server.client import Servers
from choros.distribute.parameter_server.messages import OptimizerRecipe
from choros.distribute.parameter_server.placement import Partition, Placement, Shard, VariableKey, place
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.errors import ConfigError

__all__ = ["Session"]

Array = NDArray[Any]


@final
class Session:
    """The variables of the models in ``objects``, here and on ``servers``.

    Attributes:
        objects: what was made in the scope.
        servers: all parameter servers.

    Args:
        objects: what was made in the scope.
        servers: all of them.
        partition: the strategy's ``variable_partitioner``.
    """

    def __init__(self, objects: ScopeObjects, servers: Servers, partition: Partition | None) -> None:
        self.objects = objects
        self.servers = servers
        self._partition = partition
        self._models: set[int] = set()
        self._placement = Placement(((),) * len(servers))
        self._variables: dict[VariableKey, Any] = {}
        self._keys: dict[int, VariableKey] = {}
        self._statistics: list[VariableKey] = []
        #: What both sides had last: the whole model on the chief, statistics on workers.
        self._last: dict[VariableKey, Array] = {}
        self._waiting: dict[Shard, Array] = {}

    def key_of(self, variable: Any) -> VariableKey:
        """How the servers know ``variable``.

        Raises:
            ConfigError: they do not.
        """
        self._look()
        key = self._keys.get(id(variable))
        if key is None:
            raise ConfigError(
                f"the variable {getattr(variable, 'path', variable)!r} is on no parameter server: it must be part of "
                "a model that was made within `with strategy.scope():`, and the model must be built before the first "
                "schedule(), for example with keras.Input or model.build(shape)."
            )
        return key

    def publish(self) -> None:
        """Sends the servers what they do not have, or have otherwise."""
        self._look()
        values = {key: _host(variable) for key, variable in self._variables.items()}
        news = {key: value for key, value in values.items() if not _equal(value, self._last.get(key))}
        if news:
            self.servers.assign(news, self._placement)
            self._last.update(news)
            self.pull()  # What this process has sent comes back once; it is known by then.

    def pull(self) -> None:
        """Takes over what has changed on the servers."""
        self._look()
        self._waiting.update(self.servers.pull())
        changed: dict[VariableKey, list[tuple[Shard, Array]]] = {}
        for shard in [shard for shard in self._waiting if shard.variable in self._variables]:
            changed.setdefault(shard.variable, []).append((shard, self._waiting.pop(shard)))
        for key, parts in changed.items():
            value = self._whole(key, parts)
            self._variables[key].assign(value)
            self._last[key] = value.copy()  # The framework may keep what it was given, and use its memory again.

    def push(
        self, optimizer: int, variables: Sequence[Any], gradients: Sequence[Array], learning_rate: float | None
    ) -> list[Array]:
        """Has an optimizer apply gradients; returns the variables' new values."""
        keys = [self.key_of(variable) for variable in variables]
        new = self.servers.push(optimizer, dict(zip(keys, gradients, strict=True)), learning_rate, self._placement)
        return [new[key] for key in keys]

    def adopt(self, optimizer: int, recipe: OptimizerRecipe) -> None:
        """Sees to it that the servers have an optimizer."""
        self.servers.adopt(optimizer, recipe, self._placement)

    def push_statistics(self) -> None:
        """Sends the variables that a forward pass has changed, such as batch norm's."""
        self._look()
        values = {key: _host(self._variables[key]) for key in self._statistics}
        news = {key: value for key, value in values.items() if not _equal(value, self._last.get(key))}
        if news:
            self.servers.assign(news, self._placement)

    @property
    def sharded(self) -> frozenset[VariableKey]:
        """The variables that are cut."""
        return self._placement.sharded

    def _look(self) -> None:
        """Takes in the models that have been built since the last look."""
        for number, model in self.objects.models():
            if number in self._models:
                continue
            self._models.add(number)
            own = {(number, i): v for i, v in enumerate(model.weights) if id(v) not in self._keys}
            placed = place({key: _spec(v) for key, v in own.items()}, self._partition, len(self.servers))
            together = zip(self._placement.servers, placed.servers, strict=True)
            self._placement = Placement(tuple(before + new for before, new in together))
            self._variables.update(own)
            # TensorFlow's users may pass the tf.Variable.
            self._keys.update({id(name): key for key, v in own.items() for name in (v, v.value)})
            statistics = {id(v) for layer in model._flatten_layers() for v in layer._non_trainable_variables}
            self._statistics += [key for key, v in own.items() if id(v) in statistics]

    def _whole(self, key: VariableKey, parts: list[tuple[Shard, Array]]) -> Array:
        if len(parts) == 1 and parts[0][0].end is None:
            return parts[0][1]
        value = np.array(_host(self._variables[key]))
        for shard, part in parts:
            value[shard.begin : shard.end] = part
        return value


def _spec(variable: Any) -> tuple[tuple[int, ...], str]:
    return tuple(variable.shape), str(variable.dtype)


def _host(variable: Any) -> Array:
    return np.array(adapter_of(variable.value).to_host(variable.value))


def _equal(value: Array, last: Array | None) -> bool:
    return last is not None and np.array_equal(value, last)
