"""Replicas on the devices of one process, on JAX: a function runs on all of them as one compiled step.

::

    strategy.run(step, args=(state, x))

    device 0 ─ state[0], x[0] ─┐                                   ┌─ result[0] ─┐
    device 1 ─ state[1], x[1] ─┴─► jit(shard_map(step)), compiled ─┴─ result[1] ─┴─► PerReplica
                                     once for these shapes

    in step:  all_reduce = psum       in merge_call:  reduce = psum, in the same step

Numbers and arrays in the arguments are traced. All other arguments (strings, ``True``, objects) are constants of the
step, which is compiled once for each function, structure of arguments and shapes. Keras variables that the function
reads or assigns are inputs and outputs of the step (``keras_flow.py``).

A compiled step has the same shapes on all devices. For a batch that cannot be divided equally, such as the last one of
an epoch, the replicas run eagerly instead, as threads on one device, which synchronise in each collective.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.comm import Communicator
from choros.comm.engines.threads import run_threads
from choros.distribute.devices.arguments import Pattern, by_leaf, flatten
from choros.distribute.devices.arrays import DeviceArrays
from choros.distribute.devices.collectives import (
    AXIS,
    ReplicaCollectives,
    ThreadCollectives,
    axes_of,
    axis_of,
    count_along,
    mean_of,
)
from choros.distribute.devices.compiled_step import CompileCache, CompiledStep, ReplicaFunction, flow_of
from choros.distribute.devices.names import DeviceName, jax_devices
from choros.distribute.fit.training import Training
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replica_context import ReplicaContext
from choros.distribute.replicas import Axis, Replicas
from choros.distribute.scope import enter_scope
from choros.distribute.values import PerReplica
from choros.errors import ConfigError, StrategyError

__all__ = ["DeviceReplicas", "local_devices", "on_devices"]


def local_devices(names: Sequence[str] | None = None) -> list[Any]:
    """Returns JAX's devices of this process with these names; all of the default platform if no names are given.

    Raises:
        ConfigError: there is no such device, or one is named twice.
    """
    if names is None:
        return list(jax.local_devices())
    known = jax_devices()
    wanted = [DeviceName.parse(name) for name in names]
    if len(set(wanted)) < len(wanted) or not known.keys() >= set(wanted):
        raise ConfigError(f"devices={list(names)!r}: choose from {', '.join(map(str, known))}, each once.")
    return [known[name] for name in wanted]


def on_devices(devices: Sequence[Any]) -> tuple[Replicas, Training | None]:
    """Returns the replicas on several devices of this process, and their training (``None`` without Keras)."""
    replicas = DeviceReplicas(devices)
    if "keras" not in sys.modules:
        return replicas, None
    from choros.distribute.devices.training import DeviceTraining

    return replicas, DeviceTraining(replicas, devices)


class _Active(threading.local):
    """The collectives of the replica that this thread runs, if any."""

    collectives: ReplicaCollectives | None = None


@final
class DeviceReplicas(Replicas):
    """One replica on each device of this process.

    Args:
        devices: JAX devices; at least two, of one kind.
    """

    first = 0

    def __init__(self, devices: Sequence[Any]) -> None:
        self.count = self.local_count = len(devices)
        self._mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self._arrays = DeviceArrays(self._mesh)
        self._cache = CompileCache()
        self._active = _Active()

    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the compiled step; every number or array that ``function`` returns becomes a ``PerReplica``."""
        pattern, per_replica, replicated = flatten(args, kwargs)
        for value in per_replica:
            if len(value) != self.count:
                raise ConfigError(
                    f"strategy.run got a PerReplica of {len(value)} values, but there are {self.count} replicas."
                )
        if any(len({np.shape(part) for part in value}) > 1 for value in per_replica):
            return self._run_threads(self._in_replica_context(strategy, function, pattern), per_replica, replicated)
        own = [value.values[0] for value in per_replica]

        def compiled(function: Callable[..., Any]) -> CompiledStep:
            call = self._in_replica_context(strategy, function, pattern)
            is_number = [np.ndim(part) == 0 for part in own]
            return CompiledStep(call, self._mesh, is_number, flow_of(call, self._mesh, own, replicated))

        step = self._cache.get(function, pattern.key, compiled)
        variables = self._arrays.variable_values(step.flow.variables) if step.flow else []
        whole = [self._arrays.global_array(value) for value in per_replica]
        leaves, numbers, tree, assigned = step(variables, whole, self._arrays.replicate(replicated))
        if step.flow:
            self._arrays.assign(step.flow.outputs, assigned)
        parts = [self._arrays.per_replica(leaf, numbers=number) for leaf, number in zip(leaves, numbers, strict=True)]
        return jax.tree.unflatten(tree, parts)

    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """Reduces on the first device; in a ``merge_call``, within the step."""
        if (collectives := self._active.collectives) is not None:
            return jax.tree.map(lambda leaf: collectives.reduce(op, leaf, axis), value)
        return jax.tree.map(lambda leaf: _reduced(op, self._on_first(leaf), axis), by_leaf(value))

    def gather(self, value: Any, axis: int) -> Any:
        """Gathers on the first device; in a ``merge_call``, within the step."""
        if self._active.collectives is not None:
            return self.all_gather(value, axis)
        return jax.tree.map(lambda leaf: _gathered(self._on_first(leaf), axis), by_leaf(value))

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Reduces each leaf."""
        collectives = self._active_collectives("all_reduce")
        return jax.tree.map(lambda leaf: collectives.all_reduce(op, leaf), value)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Gathers each leaf."""
        collectives = self._active_collectives("all_gather")
        return jax.tree.map(lambda leaf: collectives.all_gather(leaf, axis), value)

    def merge_call(
        self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Continues the step: ``function`` is called once for all replicas, with each one's own arguments."""
        with enter_scope(strategy):
            return function(strategy, *args, **kwargs)

    def _in_replica_context(self, strategy: Any, function: Callable[..., Any], pattern: Pattern) -> ReplicaFunction:
        """Returns a function that calls ``function`` in replica context, with arguments of this ``pattern``."""

        def call(collectives: ReplicaCollectives, per_replica: Sequence[Any], replicated: Sequence[Any]) -> Any:
            args, kwargs = pattern.unflatten(per_replica, replicated)
            with self._activate(collectives), enter_scope(strategy, ReplicaContext(strategy, collectives.replica)):
                return function(*args, **kwargs)

        return call

    def _run_threads(self, call: ReplicaFunction, per_replica: Sequence[PerReplica], replicated: Sequence[Any]) -> Any:
        devices = self._arrays.devices
        flow = flow_of(call, self._mesh, [value.values[0] for value in per_replica], replicated)

        def replica(communicator: Communicator) -> tuple[Any, list[Any]]:
            collectives = ThreadCollectives(communicator)
            with jax.default_device(devices[0]):
                own = jax.device_put([value.values[collectives.replica] for value in per_replica], devices[0])
                shared = jax.device_put(list(replicated), devices[0])
                if flow is None:
                    return call(collectives, own, shared), []
                values = [jax.device_put(variable.value, devices[0]) for variable in flow.variables]
                first = collectives.replica == 0
                return flow.run(values, first, lambda: call(collectives, own, shared), collectives.all_reduce)

        done = run_threads(replica, self.count)
        if flow is not None:
            for variable, value in zip(flow.outputs, done[0][1], strict=True):
                variable.assign(value)

        def per_replica_of(*parts: Any) -> PerReplica:
            return PerReplica([jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)])

        return jax.tree.map(per_replica_of, *(results for results, _ in done))

    @contextmanager
    def _activate(self, collectives: ReplicaCollectives) -> Iterator[None]:
        outer, self._active.collectives = self._active.collectives, collectives
        try:
            yield
        finally:
            self._active.collectives = outer

    def _active_collectives(self, method: str) -> ReplicaCollectives:
        if self._active.collectives is None:
            raise StrategyError(
                f"{method} was called outside of the replicas: call it in a function that strategy.run(fn, args=…) "
                "runs, in the same thread."
            )
        return self._active.collectives

    def _on_first(self, leaf: Any) -> list[Any]:
        """Returns the replicas' values on the first device; a plain value counts once per replica."""
        values = leaf.values if isinstance(leaf, PerReplica) else (leaf,) * self.count
        return [jax.device_put(value, self._arrays.devices[0]) for value in values]


def _reduced(op: ReduceOp, values: Sequence[Any], axis: Axis) -> Any:
    if axis is None:
        if len({value.shape for value in values}) > 1:
            raise ConfigError(
                f"reduce(axis=None) adds the replicas' values element by element, but their shapes are "
                f"{', '.join(str(value.shape) for value in values)}: pass axis=0 to reduce over the examples as well."
            )
        return (jnp.sum if op is ReduceOp.SUM else jnp.mean)(jnp.stack(values), 0)
    axes = [axes_of(value, axis) for value in values]
    total = jnp.sum(jnp.stack([value.sum(own) for value, own in zip(values, axes, strict=True)]), 0)
    if op is ReduceOp.SUM:
        return total
    return mean_of(total, sum(count_along(value, own) for value, own in zip(values, axes, strict=True)))


def _gathered(values: Sequence[Any], axis: int) -> Any:
    axes = {axis_of(value, axis, "gather") for value in values}
    others = {tuple(np.delete(value.shape, list(axes))) for value in values}
    if len(axes) > 1 or len(others) > 1:
        raise ConfigError(
            f"gather(axis={axis}): the replicas' values have the shapes "
            f"{', '.join(str(value.shape) for value in values)}; they may differ in that dimension only."
        )
    return jnp.concatenate(values, axes.pop())
