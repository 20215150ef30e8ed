"""A process's part in a ParameterServer job: its copy of the variables, and what it says about them to the servers.

::

    chief                                   servers                              worker
    publish: values that changed here ────► Assign
                                            Changed ──────────────► pull: before each function that it runs
                                            Push    ◄────────────── push: an optimizer's apply, in that function
                                            Assign  ◄────────────── push_statistics: after it, such as batch norm's
    pull: when all functions are done ◄──── Changed

A model's variables are cut and placed when all of them are there; every process comes to the same plan by itself. The
chief's variables are those of its optimizers too (slots.py), so that it publishes what it has restored, and pulls what
it will save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.distribute.parameter_server.client import Servers
from choros.distribute.parameter_server.messages import OptimizerRecipe
from choros.distribute.parameter_server.placement import Partition, Placement, Shard, SlotKey, VariableKey, place
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError
from choros.training.keras_internals import layers_of, own_statistics, own_variables

__all__ = ["Session"]

Array = NDArray[Any]


@final
class Session:
    """The variables of the models and optimizers in ``objects``, here and on ``servers``.

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
        self._seen: set[int] = set()
        self._placement = Placement(((),) * len(servers))
        self._variables: dict[VariableKey, Any] = {}
        self._keys: dict[int, VariableKey] = {}
        self._statistics: list[VariableKey] = []
        #: Digests of what both sides had last.
        self._last: dict[VariableKey, bytes] = {}
        self._waiting: dict[Shard, Array] = {}

    def key_of(self, variable: Any) -> VariableKey:
        """How the servers know ``variable``.

        Raises:
            ConfigError: they do not.
        """
        if id(variable) not in self._keys:
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
        news, digests = self._news(self._variables)
        if news:
            self.servers.assign(news, self._placement)
            self._last.update(digests)
            self.pull()  # What this process has sent comes back once; it is known by then.

    def pull(self) -> None:
        """Takes over what has changed on the servers."""
        self._waiting.update(self.servers.pull())
        self._look()
        changed: dict[VariableKey, list[tuple[Shard, Array]]] = {}
        for shard in [shard for shard in self._waiting if shard.variable in self._variables]:
            changed.setdefault(shard.variable, []).append((shard, self._waiting.pop(shard)))
        for key, parts in changed.items():
            value = self._whole(key, parts)
            self._last[key] = _digest(value)
            self._variables[key].assign(value)

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
        if news := self._news(self._statistics)[0]:
            self.servers.assign(news, self._placement)

    @property
    def sharded(self) -> frozenset[VariableKey]:
        """The variables that are cut."""
        return self._placement.sharded

    def _news(self, keys: Iterable[VariableKey]) -> tuple[dict[VariableKey, Array], dict[VariableKey, bytes]]:
        """The values that the servers did not have last, and their digests."""
        values = {key: _host(self._variables[key]) for key in keys}
        digests = {key: _digest(value) for key, value in values.items()}
        news = {key: value for key, value in values.items() if digests[key] != self._last.get(key)}
        return news, digests

    def _look(self) -> None:
        """Takes in the models and optimizers that have been built since the last look."""
        for number, model in self.objects.models():
            if number not in self._seen:
                statistics = {id(v) for layer in layers_of(model) for v in own_statistics(layer)}
                self._look_at(number, model.weights, statistics)
        for number, scale in self.objects.loss_scales():
            if number not in self._seen:
                own = own_variables(scale)
                self._look_at(number, own, set(map(id, own)))
        for number, slots in self.objects.slots():
            self._look_at_slots(number, slots)

    def _look_at(self, number: int, variables: Sequence[Any], statistics: AbstractSet[int]) -> None:
        """Takes in variables of a model, or a loss scale; those in ``statistics`` are not an optimizer's to change."""
        self._seen.add(number)
        own: dict[VariableKey, Any] = {(number, i): v for i, v in enumerate(variables) if id(v) not in self._keys}
        # Each model begins at another server, so that many small ones do not meet on the first.
        specs = {key: _spec(v) for key, v in own.items()}
        placed = place(specs, self._partition, len(self.servers), first=number)
        together = zip(self._placement.servers, placed.servers, strict=True)
        self._placement = Placement(tuple(before + new for before, new in together))
        self._variables.update(own)
        # TensorFlow's users may pass the tf.Variable.
        self._keys.update({id(name): key for key, v in own.items() for name in (v, v.value)})
        self._statistics += [key for key, v in own.items() if id(v) in statistics]

    def _look_at_slots(self, number: int, slots: Slots) -> None:
        """Takes in what an optimizer keeps; one that was built by workers alone is built."""
        optimizer = slots.optimizer
        if not optimizer.built:
            waiting = {shard.variable for shard in self._waiting}
            of = {key.variable for key in waiting if isinstance(key, SlotKey) and key.optimizer == number}
            if known := [variable for key, variable in self._variables.items() if key in of]:
                optimizer.build(known)
        new: list[SlotKey] = []
        cut = self._placement.sharded
        for index, variable, slot in slots:
            key = None if variable is None else self._keys.get(id(variable))
            slot_key = SlotKey(number, index, key)
            if slot_key in self._variables or (variable is not None and key is None):
                continue
            if key in cut and slot.shape != variable.shape:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps something of another shape, {tuple(slot.shape)}, for "
                    f"{variable.path!r}, which cannot be cut as the variable is: use another optimizer, or no "
                    "variable_partitioner."
                )
            self._variables[slot_key] = slot
            new.append(slot_key)
        if new:
            self._placement = self._placement.with_slots(new)

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


def _digest(value: Array) -> bytes:
    return hashlib.blake2b(value.tobytes(), digest_size=16).digest()
