"""The server session: a process's copies of the variables, synchronized with the parameter servers.

::

    chief                                   servers                              worker
    publish: values that changed here ────► Assign                               (while functions run: assigned ones)
                                            Changed ──────────────► pull: before it runs a function
                                            Push    ◄────────────── push: an optimizer's apply, in the function
                                            Assign  ◄────────────── push_assigned: after it, as of batch norm
    pull: after the last function ◄──────── Changed

The chief places variables once a model is built, and tells workers where they are; it has those of slots, too
(slots.py). What a function assigns to weights itself is noted, before, and sent at its end if it differs from what the
servers have. One that is compiled assigns without ``assign``, whenever it runs: what it was seen to assign when it was
traced is compared after each function, as are the statistics of layers; nothing else is.
"""

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array
from choros.errors import ConfigError
from choros.parallel.reduce.gradients import Gradient
from choros.parameter_server.cluster import Servers
from choros.parameter_server.messages import Changed, Updated
from choros.parameter_server.placement import (
    Partition,
    Placement,
    Shard,
    SlotKey,
    VariableKey,
    join,
    place,
    place_slots,
    split,
)
from choros.parameter_server.scope_objects import ScopeObjects, host
from choros.parameter_server.slots import Slots
from choros.training.keras_internals.models import (
    decays,
    in_stateless_scope,
    layers_of,
    local_value,
    own_statistics,
    own_variables,
    seed_generators_of,
)
from choros.training.random_numbers import draw_by_replica
from choros.training.replaced import derived
from choros.training.thread import doing, thread
from choros.training.variables import derive_again


@final
class ServerSession:
    """Synchronizes the variables of the models and optimizers in ``objects`` with ``servers``; ``worker``: its number,
    ``None`` on the chief, which places variables by a ``partition``.
    """

    def __init__(
        self,
        objects: ScopeObjects,
        servers: Servers,
        *,
        partition: Partition | None = None,
        worker: int | None = None,
    ) -> None:
        self.objects = objects
        self._worker = worker
        self.servers = servers
        self._partition = partition
        self._seen: set[int] = set()
        self._placement: Placement = {}
        self._variables: dict[VariableKey, Any] = {}
        self._keys: dict[int, VariableKey] = {}
        #: On the chief, digests of the values that it and the servers last agreed on.
        self._last: dict[VariableKey, bytes] = {}
        #: Variables that are assigned while functions run, of which some are assigned only now, by this one; on a
        #: worker these values, and what this function was given by ``push``.
        self._agreed: dict[VariableKey, Array | None] = {}
        self._briefly: set[VariableKey] = set()
        self._pushed: dict[VariableKey, Array] = {}
        #: The version of each server that this process knows, and received shards that are not assigned yet.
        self._versions = [0] * len(servers)
        self._received: dict[Shard, Array] = {}
        #: The updates of each optimizer that the servers have counted, and the servers that apply it.
        self.updates: dict[int, int] = {}
        self._appliers: dict[int, frozenset[int]] = {}

    def key_of(self, variable: Any) -> VariableKey:
        """Returns the key of ``variable`` on the servers; ConfigError if they do not store it."""
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
        key = self.key_of(variable)  # may replace the placement
        return self._placement[key]

    def keys_of(self, variables: Iterable[Any]) -> tuple[VariableKey, ...]:
        """Returns the keys of those of the variables that the servers store."""
        self._discover()
        return tuple(self._keys[id(variable)] for variable in variables if id(variable) in self._keys)

    def variables_of(self, keys: Sequence[VariableKey]) -> list[Any]:
        """Returns the variables with these keys; none before this process has all of them."""
        self._discover()
        known = all(key in self._variables for key in keys)
        return [self._variables[key] for key in keys] if known else []

    def undecayed(self, optimizer: Any) -> frozenset[VariableKey]:
        """Returns the variables to which the optimizer applies no weight decay."""
        variables = {key: v for key, v in self._variables.items() if not isinstance(key, SlotKey)}
        return frozenset(key for key, variable in variables.items() if not decays(optimizer, variable))

    def publish(self, *, running: bool) -> None:
        """Sends the servers what they lack or what has changed in this process; while functions run, what was assigned,
        as by a callback: ConfigError if they have changed it, too.
        """
        if not running:
            self._discover()
        assigned = self._take_assigned()
        changed = self._changed(assigned if running else self._variables)
        if not changed:
            return
        if running:
            before = {key: self._last.get(key) for key in changed}
            self.pull()
            if lost := [key for key in changed if self._last.get(key) != before[key]]:
                raise ConfigError(
                    f"{self._variables[lost[0]].path!r} was assigned here while functions run on workers, which have "
                    "changed it, too: assign it in the function or the train_step, or when none runs (after join(), or "
                    "at the end of an epoch); only then this process has its value."
                )
        self._assign(changed)
        self.pull()  # The servers send these values back once; receive them now.

    def synchronize(self) -> None:
        """Publishes what was assigned here, and pulls the rest."""
        self.publish(running=True)
        self.pull()

    def pull(self) -> None:
        """Assigns the values that have changed on the servers."""
        slots = bool(self.objects.slots)
        self._receive(self.servers.request("pull", {i: (known, slots) for i, known in enumerate(self._versions)}))
        self._discover()
        changed: dict[VariableKey, list[tuple[Shard, Array]]] = {}
        for shard in [shard for shard in self._received if shard.variable in self._variables]:
            changed.setdefault(shard.variable, []).append((shard, self._received.pop(shard)))
        for key, parts in changed.items():
            value = _whole(self._variables[key], parts)
            if self._worker is None:
                self._last[key] = _digest(value)
            self._pushed.pop(key, None)
            self._agree(key, value)
            with doing("receiving_values"):
                self._variables[key].assign(value)
        derive_again([self._variables[key] for key in changed])

    def push(
        self,
        optimizer: int,
        variables: Sequence[Any],
        gradients: Sequence[Gradient],
        learning_rate: float | None,
    ) -> list[Array]:
        """Has the servers' optimizer apply gradients; returns the new values of the variables. Servers that have others
        of its variables count the step.
        """
        keys = [self.key_of(variable) for variable in variables]
        parts = split(dict(zip(keys, gradients, strict=True)), self._placement)
        requests = {
            i: (optimizer, parts.get(i, {}), learning_rate, self._versions[i])
            for i in sorted(self._appliers[optimizer] | parts.keys())
        }
        self._receive(self.servers.request("push", requests))
        received = {shard: self._received.pop(shard) for part in parts.values() for shard in part}
        new = {key: join(key, self._placement, received) for key in keys}
        self._pushed.update(new)
        for key, value in new.items():
            self._agree(key, value)
        return [new[key] for key in keys]

    def register(self, optimizer: int, pickled: bytes, updated: Updated) -> None:
        """Registers an optimizer with every server that stores one of its variables."""
        concerned = frozenset(server for key in updated for server, _ in self._placement[key])
        self._appliers[optimizer] = concerned
        self.servers.request("register", dict.fromkeys(concerned, (optimizer, pickled, updated)))

    def average(self, optimizer: int) -> None:
        """Overwrites an optimizer's variables with their moving averages, on the servers and in this process."""
        self.servers.request("average", dict.fromkeys(range(len(self.servers)), (optimizer,)))
        self.pull()

    def note(self, variable: Any, *, compiled: bool) -> None:
        """Notes, before, that a function (on the chief: a callback) assigns a variable now or, ``compiled``, whenever
        it runs.
        """
        key = self._keys.get(id(variable))
        if key is None:
            return
        if key not in self._agreed:
            self._briefly.add(key)
            self._agreed[key] = None if self._worker is None else copy_of(variable)
            if key in self._pushed:  # on JAX perhaps at this moment, by a function that still runs
                self._agreed[key] = self._pushed[key]
        if compiled:
            self._briefly.discard(key)

    def push_assigned(self, variables: Sequence[Any] | None = None) -> None:
        """Sends what a function has assigned to these variables; at its end to all, such as batch norm's statistics."""
        if variables is None:
            self._discover()
        keys = list(self._agreed) if variables is None else map(self.key_of, variables)
        changed: dict[VariableKey, Array] = {}
        for key in [key for key in keys if key in self._agreed]:
            value, agreed = copy_of(self._variables[key]), self._agreed[key]
            if value is not None and (agreed is None or not np.array_equal(value, agreed)):
                changed[key] = value
        if changed:
            self._assign(changed)
            self._agreed.update(changed)
        if variables is None:
            self._take_assigned()
            self._pushed.clear()

    def _take_assigned(self) -> list[VariableKey]:
        """Returns the variables that are noted, and forgets those that were to be assigned once."""
        assigned = list(self._agreed)
        self._agreed = {key: value for key, value in self._agreed.items() if key not in self._briefly}
        self._briefly.clear()
        return assigned

    def _agree(self, key: VariableKey, value: Array) -> None:
        if key in self._agreed and self._worker is not None:
            self._agreed[key] = np.array(value)

    def _assign(self, values: Mapping[VariableKey, Array]) -> None:
        parts = split(values, self._placement)
        self.servers.request("assign", {server: (part,) for server, part in parts.items()})

    def _receive(self, replies: Mapping[int, Changed]) -> None:
        counts: dict[int, int] = {}
        for server, (version, changed) in replies.items():
            self._versions[server] = version
            self._received.update(changed)
            for shard, value in changed.items():
                if isinstance(shard.variable, SlotKey) and shard.is_count:
                    number = shard.variable.optimizer
                    counts[number] = max(int(value), counts.get(number, 0))
        self.updates.update(counts)

    def _changed(self, keys: Iterable[VariableKey]) -> dict[VariableKey, Array]:
        """Returns the values that differ from those the servers last had."""
        values = {key: host(self._variables[key]) for key in keys}
        return {key: value for key, value in values.items() if _digest(value) != self._last.get(key)}

    def _discover(self) -> None:
        """Adds the variables of models and optimizers that were built since the last call."""
        worker = self._worker
        for number, model in self.objects.models():
            if number not in self._seen:
                statistics = {id(v) for layer in layers_of(model) for v in own_statistics(layer)}
                self._discover_variables(number, model.weights, statistics)
                for generator in seed_generators_of(model) if worker else ():
                    draw_by_replica(generator, lambda: worker)  # not the session, which a copy would copy
        for number, scale in self.objects.loss_scales():
            if number not in self._seen:
                own = own_variables(scale)
                self._discover_variables(number, own, set(map(id, own)))
        for number, slots in self.objects.slots.items():
            self._discover_slots(number, slots)

    def _discover_variables(self, number: int, variables: Sequence[Any], statistics: AbstractSet[int]) -> None:
        """Adds variables of a model or a loss scale; optimizers do not update those in ``statistics``."""
        if self._worker is None:
            # Weights that models have in common have the key of the first one.
            keys = [self._keys.get(id(v), (number, i)) for i, v in enumerate(variables)]
            specs = {key: (tuple(v.shape), str(v.dtype)) for key, v in zip(keys, variables, strict=True)}
            new = {key: spec for key, spec in specs.items() if key not in self._placement}
            # Each model starts at a different server, so that many small ones do not all fill the first.
            placed = {**self._placement, **place(new, self._partition, len(self.servers), first=number)}
            self.objects.put(("placed", number), {key: placed[key] for key in keys})
        elif ("placed", number) not in self.objects.revisions:
            return
        self._seen.add(number)
        plan: Placement = self.objects.resolve(("placed", number))
        own = {key: v for key, v in zip(plan, variables, strict=True) if id(v) not in self._keys}
        self._placement = {**plan, **self._placement}
        self._variables.update(own)
        self._keys.update({id(v): key for key, v in own.items()})
        if keras.backend.backend() == "tensorflow":  # users may pass the tf.Variable
            self._keys.update({id(v.value): key for key, v in own.items()})
        if self._worker is not None:
            self._agreed.update({key: None for key, v in own.items() if id(v) in statistics})
        for variable in own.values():
            note_assignments(variable, self)

    def _discover_slots(self, number: int, slots: Slots) -> None:
        """Adds an optimizer's slots; builds it first if only workers have built it."""
        optimizer = slots.optimizer
        if not optimizer.built:
            received = {shard.variable for shard in self._received}
            used = {key.variable for key in received if isinstance(key, SlotKey) and key.optimizer == number}
            if known := [variable for key, variable in self._variables.items() if key in used]:
                optimizer.build(known)
        new: list[SlotKey] = []
        for index, variable, slot in slots:
            key = None if variable is None else self._keys.get(id(variable))
            slot_key = SlotKey(number, index, key)
            if slot_key in self._variables or (variable is not None and key is None):
                continue
            if key is not None and len(self._placement[key]) > 1 and slot.shape != variable.shape:
                raise ConfigError(
                    f"{type(optimizer).__name__} has a slot of another shape, {tuple(slot.shape)}, for the sharded "
                    f"{variable.path!r}, and cannot shard it like the variable: use another optimizer, or no "
                    "variable_partitioner."
                )
            self._variables[slot_key] = slot
            new.append(slot_key)
        self._placement = {**self._placement, **place_slots(new, self._placement, len(self.servers))}


def _whole(variable: Any, parts: list[tuple[Shard, Array]]) -> Array:
    if len(parts) == 1 and parts[0][0].end is None:
        return parts[0][1]
    value = host(variable)
    for shard, part in parts:
        value[shard.begin : shard.end] = part
    return value


def _digest(value: Array) -> bytes:
    return hashlib.blake2b(value.tobytes(), digest_size=16).digest()


_SESSION = "_choros_session"


def note_assignments(variable: Any, session: Any) -> None:
    """Makes ``assign`` of a worker's variable call ``session.note`` first."""
    variable.__class__ = derived(type(variable), _Noted)
    # Not the session itself, which a copy of the variable would copy.
    object.__setattr__(variable, _SESSION, weakref.ref(session))


class _Noted:
    """The method of a variable that notes what a function assigns."""

    def assign(self, value: Any) -> Any:
        """Keras' own."""
        session = getattr(self, _SESSION)()
        if session is not None and not thread.receiving_values:
            is_compiled = in_stateless_scope() or adapter_of(local_value(self)).is_symbolic([value])
            session.note(self, compiled=is_compiled)
        return super().assign(value)  # type: ignore[misc]


def copy_of(variable: Any) -> Array | None:
    """Returns a copy of a variable's value, also while a function is traced; ``None`` if JAX has given it away."""
    value = local_value(variable)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.init_scope():
            return np.array(adapter_of(value).to_host(value))
    if keras.backend.backend() == "jax" and value.is_deleted():
        return None
    return np.array(adapter_of(value).to_host(value))
