"""The server session: a process's copies of the variables, synchronized with the parameter servers.

::

    chief                                   servers                              worker
    publish: values that changed here ────► Assign
                                            Changed ──────────────► pull: before it runs a function
                                            Push    ◄────────────── push: an optimizer's apply, in the function
                                            Assign  ◄────────────── push_statistics: after it, as of batch norm
    pull: after the last function ◄──────── Changed

A model's variables are sharded and placed once the model is built; every process computes the same plan. On the chief
the variables include the optimizers' slots (slots.py), so that it publishes what it restored and pulls what it saves.
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
from choros.distribute.parameter_server.placement import (
    Partition,
    Placed,
    Placement,
    Shard,
    SlotKey,
    VariableKey,
    place,
)
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError
from choros.training.keras_internals import decays, layers_of, own_statistics, own_variables

__all__ = ["ServerSession"]

Array = NDArray[Any]


@final
class ServerSession:
    """Synchronizes the variables of the models and optimizers in ``objects`` with ``servers``.

    Attributes:
        objects: the objects created in the scope.
        servers: the connections to all parameter servers.

    Args:
        objects: the objects created in the scope.
        servers: the connections to all parameter servers.
        partition: the strategy's ``variable_partitioner``.
    """

    def __init__(self, objects: ScopeObjects, servers: Servers, partition: Partition | None) -> None:
        self.objects = objects
        self.servers = servers
        self._partition = partition
        self._seen: set[int] = set()
        self._planned: dict[int, Placed] = {}
        self._placement = Placement(((),) * len(servers))
        self._variables: dict[VariableKey, Any] = {}
        self._keys: dict[int, VariableKey] = {}
        self._statistics: list[VariableKey] = []
        #: Digests of the values that this process and the servers last agreed on.
        self._last: dict[VariableKey, bytes] = {}
        self._waiting: dict[Shard, Array] = {}

    def key_of(self, variable: Any) -> VariableKey:
        """Returns the key of ``variable`` on the servers.

        Raises:
            ConfigError: the servers do not store it.
        """
        if id(variable) not in self._keys:
            self._discover()
        key = self._keys.get(id(variable))
        if key is None:
            raise ConfigError(
                f"the variable {getattr(variable, 'path', variable)!r} is on no parameter server: it must be part of "
                "a model created within `with strategy.scope():`, and the model must be built before the first "
                "schedule(), for example with keras.Input or model.build(shape)."
            )
        return key

    def shards_of(self, variable: Any) -> Sequence[tuple[int, Shard]]:
        """Returns the servers and the shards of ``variable``, in the order of their rows; raises as ``key_of``."""
        key = self.key_of(variable)
        ((_, shards),) = self._placement.of([key])
        return sorted(shards, key=lambda pair: pair[1].begin)

    def placed(self, model: Any) -> Placed:
        """Returns where the weights of a model are; empty if it is not built yet."""
        keys = [self._keys.get(id(weight)) for weight in model.weights]
        return self._placement.of([key for key in keys if key is not None]) if None not in keys else ()

    def plan(self, number: int, placed: Placed) -> None:
        """Sets where the weights of model ``number`` are, as the chief has placed them."""
        self._planned[number] = placed

    def undecayed(self, optimizer: Any) -> frozenset[VariableKey]:
        """Returns the variables to which the optimizer applies no weight decay."""
        variables = {key: v for key, v in self._variables.items() if not isinstance(key, SlotKey)}
        return frozenset(key for key, variable in variables.items() if not decays(optimizer, variable))

    def publish(self) -> None:
        """Sends the servers the values that they lack or that have changed in this process."""
        self._discover()
        changed, digests = self._changed(self._variables)
        if changed:
            self.servers.assign(changed, self._placement)
            self._last.update(digests)
            self.pull()  # The servers send these values back once; receive them now.

    def pull(self) -> None:
        """Assigns the values that have changed on the servers."""
        self._waiting.update(self.servers.pull())
        self._discover()
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
        """Has the servers' optimizer apply gradients; returns the new values of the variables."""
        keys = [self.key_of(variable) for variable in variables]
        new = self.servers.push(optimizer, dict(zip(keys, gradients, strict=True)), learning_rate, self._placement)
        return [new[key] for key in keys]

    def register(self, optimizer: int, recipe: OptimizerRecipe) -> None:
        """Registers an optimizer with the servers."""
        self.servers.register(optimizer, recipe, self._placement)

    def push_statistics(self) -> None:
        """Sends the variables that a forward pass has changed, such as batch norm's."""
        self._discover()
        if changed := self._changed(self._statistics)[0]:
            self.servers.assign(changed, self._placement)

    @property
    def sharded(self) -> frozenset[VariableKey]:
        """The variables that are split into several shards."""
        return self._placement.sharded

    def _changed(self, keys: Iterable[VariableKey]) -> tuple[dict[VariableKey, Array], dict[VariableKey, bytes]]:
        """Returns the values that differ from those the servers last had, and all digests."""
        values = {key: _host(self._variables[key]) for key in keys}
        digests = {key: _digest(value) for key, value in values.items()}
        changed = {key: value for key, value in values.items() if digests[key] != self._last.get(key)}
        return changed, digests

    def _discover(self) -> None:
        """Adds the variables of models and optimizers that were built since the last call."""
        for number, model in self.objects.models():
            if number not in self._seen:
                statistics = {id(v) for layer in layers_of(model) for v in own_statistics(layer)}
                self._discover_variables(number, model.weights, statistics)
        for number, scale in self.objects.loss_scales():
            if number not in self._seen:
                own = own_variables(scale)
                self._discover_variables(number, own, set(map(id, own)))
        for number, slots in self.objects.slots():
            self._discover_slots(number, slots)

    def _discover_variables(self, number: int, variables: Sequence[Any], statistics: AbstractSet[int]) -> None:
        """Adds variables of a model or a loss scale; optimizers do not update those in ``statistics``."""
        import keras

        self._seen.add(number)
        own: dict[VariableKey, Any]
        if placed := self._planned.get(number):
            # The chief may have numbered the weights that models have in common by another one of them.
            own = {key: v for (key, _), v in zip(placed, variables, strict=True) if id(v) not in self._keys}
            self._placement = self._placement.with_placed(placed)
        else:
            own = {(number, i): v for i, v in enumerate(variables) if id(v) not in self._keys}
            # Each model starts at a different server, so that many small ones do not all fill the first.
            specs = {key: _spec(v) for key, v in own.items()}
            new = place(specs, self._partition, len(self.servers), first=number)
            self._placement = self._placement.with_placed(new.of(own))
        self._variables.update(own)
        self._keys.update({id(v): key for key, v in own.items()})
        if keras.backend.backend() == "tensorflow":  # users may pass the tf.Variable
            self._keys.update({id(v.value): key for key, v in own.items()})
        self._statistics += [key for key, v in own.items() if id(v) in statistics]

    def _discover_slots(self, number: int, slots: Slots) -> None:
        """Adds an optimizer's slots; builds it first if only workers have built it."""
        optimizer = slots.optimizer
        if not optimizer.built:
            waiting = {shard.variable for shard in self._waiting}
            used = {key.variable for key in waiting if isinstance(key, SlotKey) and key.optimizer == number}
            if known := [variable for key, variable in self._variables.items() if key in used]:
                optimizer.build(known)
        new: list[SlotKey] = []
        sharded = self._placement.sharded
        for index, variable, slot in slots:
            key = None if variable is None else self._keys.get(id(variable))
            slot_key = SlotKey(number, index, key)
            if slot_key in self._variables or (variable is not None and key is None):
                continue
            if key in sharded and slot.shape != variable.shape:
                raise ConfigError(
                    f"{type(optimizer).__name__} has a slot of another shape, {tuple(slot.shape)}, for the sharded "
                    f"{variable.path!r}, and cannot shard it like the variable: use another optimizer, or no "
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
