"""Replicas on the devices of one process, on JAX: a function runs on all of them as one compiled step.

::

    strategy.run(step, args=(state, x))

    device 0 ─ state[0], x[0] ─┐                                   ┌─ result[0] ─┐
    device 1 ─ state[1], x[1] ─┴─► jit(shard_map(step)), compiled ─┴─ result[1] ─┴─► PerReplica
                                     once for these shapes

    in step:  all_reduce = psum       in merge_call:  reduce = psum, in the same step

Numbers and arrays in the arguments are traced; all others are constants of the step, compiled once for each
function, structure and shapes; Keras variables are its inputs and outputs (``training.py``). Per-replica values are
one array that is sharded over the devices::

    PerReplica(a, b), a and b of shape (3, 5)  ◄──►  one array of shape (6, 5), a on device 0, b on device 1
    PerReplica(1.0, 2.0)                       ◄──►  one array of shape (2,)

A batch that cannot be divided equally runs eagerly instead, as threads on one device that meet in each collective.
"""

from __future__ import annotations

import enum
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.comm.engines.threads import ThreadCommunicator, run_threads
from choros.data.rows import Part
from choros.distribute.device_collectives import AXIS, Flow, ReplicaCollectives, gathered, reduced
from choros.distribute.replicas import Axis, ReplicaContext, Replicas
from choros.distribute.scope import enter_scope
from choros.distribute.types import PerReplica, ReduceOp
from choros.errors import ConfigError, StrategyError

V = TypeVar("V")
#: What stands for one value per replica, and for an array or number that is replicated, in a pattern of arguments.
_PER_REPLICA, _SHARED = object(), object()

#: Returns a replica's arguments, positional and by keyword, of its own values and the replicated ones.
Unflatten = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
#: Calls the user's function on one replica, given its collectives, its per-replica and the replicated values.
_ReplicaFunction = Callable[[ReplicaCollectives, Sequence[Any], Sequence[Any]], Any]
#: A compiled step of all replicas: its variables, itself, and which of its results are scalars, once it is traced.
_Step = tuple[Flow, Callable[..., Any], list[bool]]

_SHARDED, _REPLICATED = PartitionSpec(AXIS), PartitionSpec()


@final
class DeviceReplicas(Replicas):
    """One replica on each device of this process; at least two devices, of one kind."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.part = Part(0, len(devices), len(devices))
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._arrays = DeviceArrays(self._mesh)
        self._steps: WeakMap[dict[Any, _Step]] = WeakMap()
        #: ``collectives``: those of the replica that this thread runs.
        self._thread = threading.local()

    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the compiled step; every number or array that ``function`` returns becomes a ``PerReplica``."""
        unflatten, key, per_replica, replicated = flatten(args, kwargs)
        for value in per_replica:
            if len(value) != self.count:
                raise ConfigError(
                    f"strategy.run got a PerReplica of {len(value)} values, but there are {self.count} replicas."
                )
        if any(len({np.shape(part) for part in value}) > 1 for value in per_replica):
            return self._run_threads(self._in_replica_context(strategy, function, unflatten), per_replica, replicated)
        own = [value.values[0] for value in per_replica]

        def compiled(function: Callable[..., Any]) -> _Step:
            call = self._in_replica_context(strategy, function, unflatten)
            is_number = [np.ndim(part) == 0 for part in own]
            return _compiled_step(call, self._mesh, is_number, self._flow_of(call, own, replicated))

        flow, step, numbers = _compiled_for(function, key, self._steps, compiled)
        variables = self._arrays.variable_values(flow.variables)
        whole = [self._arrays.global_array(value) for value in per_replica]
        results, assigned = step(variables, whole, self._arrays.replicate(replicated))
        self._arrays.assign(flow.outputs, assigned)
        leaves, tree = jax.tree.flatten(results)
        parts = [self._arrays.per_replica(leaf, numbers=number) for leaf, number in zip(leaves, numbers, strict=True)]
        return jax.tree.unflatten(tree, parts)

    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """Reduces on the first device; in a ``merge_call``, within the step."""
        collectives = self._collectives
        if collectives is not None:
            return jax.tree.map(lambda leaf: collectives.reduce(op, leaf, axis), value)
        return jax.tree.map(lambda leaf: reduced(op, self._on_first(leaf), axis), by_leaf(value))

    def gather(self, value: Any, axis: int) -> Any:
        """Gathers on the first device; in a ``merge_call``, within the step."""
        if self._collectives is not None:
            return self.all_gather(value, axis)
        return jax.tree.map(lambda leaf: gathered(self._on_first(leaf), axis), by_leaf(value))

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Reduces each leaf."""
        collectives = self._collectives_for("all_reduce")
        return jax.tree.map(lambda leaf: collectives.all_reduce(op, leaf), value)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Gathers each leaf."""
        collectives = self._collectives_for("all_gather")
        return jax.tree.map(lambda leaf: collectives.all_gather(leaf, axis), value)

    def _in_replica_context(
        self, strategy: Any, function: Callable[..., Any], unflatten: Unflatten
    ) -> _ReplicaFunction:
        """Returns a function that calls ``function`` in replica context, with arguments of one pattern."""

        def call(collectives: ReplicaCollectives, per_replica: Sequence[Any], replicated: Sequence[Any]) -> Any:
            args, kwargs = unflatten(per_replica, replicated)
            with self._activate(collectives), enter_scope(strategy, ReplicaContext(strategy, collectives.replica)):
                return function(*args, **kwargs)

        return call

    def _flow_of(self, call: _ReplicaFunction, per_replica: Sequence[Any], replicated: Sequence[Any]) -> Flow:
        """Returns the Keras variables that a function reads and assigns."""
        if "keras" not in sys.modules:
            return Flow()
        from choros.distribute.device_training import flow_of

        return flow_of(call, self._mesh, per_replica, replicated)

    def _run_threads(self, call: _ReplicaFunction, per_replica: Sequence[PerReplica], replicated: Sequence[Any]) -> Any:
        devices = self._arrays.devices
        flow = self._flow_of(call, [value.values[0] for value in per_replica], replicated)

        def replica(communicator: ThreadCommunicator) -> tuple[Any, list[Any]]:
            collectives = ReplicaCollectives(communicator)
            with jax.default_device(devices[0]):
                own = jax.device_put([value.values[collectives.replica] for value in per_replica], devices[0])
                shared = jax.device_put(list(replicated), devices[0])
                values = [jax.device_put(variable.value, devices[0]) for variable in flow.variables]
                return flow.run(collectives, values, lambda: call(collectives, own, shared))

        done = run_threads(replica, self.count)
        for variable, value in zip(flow.outputs, done[0][1], strict=True):
            variable.assign(value)

        def per_replica_of(*parts: Any) -> PerReplica:
            return PerReplica([jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)])

        return jax.tree.map(per_replica_of, *(results for results, _ in done))

    @contextmanager
    def _activate(self, collectives: ReplicaCollectives) -> Iterator[None]:
        outer, self._thread.collectives = self._collectives, collectives
        try:
            yield
        finally:
            self._thread.collectives = outer

    @property
    def _collectives(self) -> ReplicaCollectives | None:
        """Those of the replica that this thread runs, if any."""
        return getattr(self._thread, "collectives", None)

    def _collectives_for(self, method: str) -> ReplicaCollectives:
        if self._collectives is None:
            raise StrategyError(
                f"{method} was called outside of the replicas: call it in a function that strategy.run(fn, args=…) "
                "runs, in the same thread."
            )
        return self._collectives

    def _on_first(self, leaf: Any) -> list[Any]:
        """Returns the replicas' values on the first device; a plain value counts once per replica."""
        values = leaf.values if isinstance(leaf, PerReplica) else (leaf,) * self.count
        return [jax.device_put(value, self._arrays.devices[0]) for value in values]


def _compiled_step(call: _ReplicaFunction, mesh: Mesh, is_number: Sequence[bool], flow: Flow) -> _Step:
    """Returns one step for all replicas, of whose values some are numbers; the flow's Keras variables are its first
    inputs and its last outputs.
    """
    results_are_numbers: list[bool] = []

    def on_device(variables: Any, per_replica: Any, replicated: Any) -> tuple[Any, list[Any]]:
        collectives = ReplicaCollectives()
        own = [array.reshape(()) if number else array for array, number in zip(per_replica, is_number, strict=True)]
        results, assigned = flow.run(collectives, variables, lambda: call(collectives, own, replicated))
        results = jax.tree.map(jnp.asarray, results)
        results_are_numbers[:] = [leaf.ndim == 0 for leaf in jax.tree.leaves(results)]
        return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.reshape(1), results), assigned

    specs = {"in_specs": (_REPLICATED, _SHARDED, _REPLICATED), "out_specs": (_SHARDED, _REPLICATED)}
    return flow, jax.jit(jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)), results_are_numbers


def _compiled_for(
    function: Callable[..., Any],
    key: Any,
    known: WeakMap[dict[Any, _Step]],
    make: Callable[[Callable[..., Any]], _Step],
) -> _Step:
    """Returns the compiled step for arguments of this ``key``, ``known`` while the function, or a method's object,
    exists; the function that ``make`` gets does not keep the user's alive.
    """
    owner: Any = function
    method = None
    if isinstance(function, types.MethodType):
        owner, method = function.__self__, function.__func__
    reference = weakref.ref(owner)

    def weakly(*args: Any, **kwargs: Any) -> Any:
        own = reference()
        return own(*args, **kwargs) if method is None else method(own, *args, **kwargs)  # type: ignore[misc]

    steps = known.get(owner)
    if steps is None:
        known[owner] = steps = {}
    if (method, key) not in steps:
        steps[method, key] = make(weakly)
    return steps[method, key]


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Unflatten, Any, list[PerReplica], list[Any]]:
    """Returns what restores the arguments, a key, per-replica values, and replicated ones. The key is equal if one
    compiled step serves both, while the constants live. StrategyError if JAX is tracing the arguments.
    """
    given, tree = jax.tree.flatten(by_leaf((tuple(args), dict(kwargs))))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in (*given, jnp.zeros(()))):
        raise StrategyError(
            "strategy.run was called within a function that JAX compiles or differentiates, but it compiles the "
            "function itself. Call it outside of jax.jit and jax.grad."
        )
    leaves: list[Any] = []
    key: list[Any] = []
    per_replica: list[PerReplica] = []
    replicated: list[Any] = []
    for leaf in given:
        if isinstance(leaf, PerReplica):
            leaves.append(_PER_REPLICA)
            per_replica.append(leaf)
            key.append((_PER_REPLICA, *_spec(leaf.values[0])))
        elif _is_array(leaf):
            leaves.append(_SHARED)
            replicated.append(_array(leaf))
            key.append((_SHARED, *_spec(leaf)))
        else:
            leaves.append(leaf)
            key.append(leaf if isinstance(leaf, (bool, str, bytes, enum.Enum)) else id(leaf))

    def unflatten(own: Sequence[Any], shared: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        arrays = {id(_PER_REPLICA): iter(own), id(_SHARED): iter(shared)}
        restored = [next(arrays[id(leaf)]) if id(leaf) in arrays else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, restored)
        return args, kwargs

    return unflatten, (tree, tuple(key)), per_replica, replicated


def by_leaf(structure: Any) -> Any:
    """Replaces every ``PerReplica`` of structures, such as batches, by a structure of ``PerReplica`` leaves."""

    def leaf_by_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or all(isinstance(value, jax.Array) for value in leaf.values):
            return leaf
        return jax.tree.map(lambda *values: PerReplica([_array(value) for value in values]), *leaf.values)

    return jax.tree.map(leaf_by_leaf, structure)


def _is_array(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of any framework; a Keras variable has a value, but is not an array."""
    if isinstance(leaf, (int, float, complex)):
        return not isinstance(leaf, bool)
    return hasattr(leaf, "__array__") and not hasattr(leaf, "__jax_array__")


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, int, float, complex)) else np.asarray(leaf)


def _spec(array: Any) -> tuple[Any, ...]:
    return np.shape(array), getattr(array, "dtype", type(array))


@final
class DeviceArrays:
    """The global arrays of a mesh with one dimension and one device per replica."""

    def __init__(self, mesh: Mesh) -> None:
        self.devices = list(mesh.devices.flat)
        self._sharded = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        #: Per-replica value → the global array that it is part of, so that it need not be assembled again.
        self._global_arrays: WeakMap[Any] = WeakMap()
        #: Keras variable → its local value, and the replicated array of the same value.
        self._variables: WeakMap[tuple[Any, Any]] = WeakMap()

    def global_array(self, value: PerReplica) -> Any:
        """Returns the array whose shards are the values, all of one shape; values on their device are not copied."""
        known = self._global_arrays.get(value)
        if known is not None:
            return known
        parts = [jax.device_put(part, device) for part, device in zip(value.values, self.devices, strict=True)]
        parts = [part if part.ndim else part.reshape(1) for part in parts]
        length, *rest = parts[0].shape
        array = jax.make_array_from_single_device_arrays((length * len(parts), *rest), self._sharded, parts)
        self._global_arrays[value] = array
        return array

    def per_replica(self, array: Any, *, numbers: bool) -> PerReplica:
        """Returns the replicas' values; ``numbers``: whether they are scalars."""
        # In the order of the mesh. addressable_shards would create an object for each shard, the largest cost here.
        values = [array.addressable_data(index) for index in range(len(self.devices))]
        value = PerReplica([value.reshape(()) for value in values] if numbers else values)
        self._global_arrays[value] = array
        return value

    def replicate(self, values: Sequence[Any]) -> list[Any]:
        """Copies values to every replica's device."""
        return list(jax.device_put(list(values), self._replicated))

    def variable_values(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the replicated values of Keras variables; copies them to the devices only if they have changed."""
        arrays = []
        for variable in variables:
            value, array = self._variables.get(variable) or (None, None)
            if value is not variable.value:
                array = jax.device_put(variable.value, self._replicated)
                self._variables[variable] = (variable.value, array)
            arrays.append(array)
        return arrays

    def assign(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Assigns the replicated values to Keras variables, as ordinary arrays of the first device."""
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array.addressable_data(0))
            self._variables[variable] = (variable.value, array)


@final
class WeakMap(Generic[V]):
    """A weak-key dictionary by identity, for keys that redefine equality, as Keras variables do.

    >>> class Owner: ...
    >>> owner, known = Owner(), WeakMap()
    >>> known[owner] = 1
    >>> known.get(owner), known.get(Owner())
    (1, None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: Any) -> V | None:
        """Returns the value of ``key``; ``None`` if there is none."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def __setitem__(self, key: Any, value: V) -> None:
        number = id(key)
        self._entries[number] = (weakref.ref(key, lambda _: self._entries.pop(number, None)), value)
