"""Replicas that are the devices of one process, on JAX: a function runs on all of them as one compiled program.

::

    strategy.run(step, args=(state, x))

    device 0 ─ state[0], x[0] ─┐                                   ┌─ result[0] ─┐
    device 1 ─ state[1], x[1] ─┴─► jit(shard_map(step)), compiled ─┴─ result[1] ─┴─► PerReplica
                                     once for these shapes

    in step:  all_reduce = psum       in merge_call:  reduce = psum, the program goes on

Numbers and arrays in the arguments are traced. What else is there (words, ``True``, objects) is part of the program,
which is compiled once for each function, structure of arguments and shapes. Keras variables that the function reads or
assigns are inputs and outputs of the program (``keras_flow.py``).

A program has one shape for all devices. For a batch that they cannot share equally, such as the last of an epoch,
replicas compute one operation at a time instead, as threads on one device, which meet where they exchange something.
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
from choros.distribute.devices.arguments import Pattern, by_leaf, taken_apart
from choros.distribute.devices.arrays import DeviceArrays
from choros.distribute.devices.collectives import AXIS, Link, Threads, axis_of, mean_of
from choros.distribute.devices.compiled_step import Call, Compiled, Memory, flow_of
from choros.distribute.devices.names import DeviceName, jax_devices
from choros.distribute.fit.training import Training
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replica_context import ReplicaContext
from choros.distribute.replicas import Replicas
from choros.distribute.scope import enter_scope
from choros.distribute.values import PerReplica
from choros.errors import ConfigError, StrategyError

__all__ = ["DeviceReplicas", "local_devices", "on_devices"]


def local_devices(names: Sequence[str] | None = None) -> list[Any]:
    """JAX's devices of this process that have these names; all of the default platform if no names are given.

    Raises:
        ConfigError: there is no such device, or one is named twice.
    """
    if names is None:
        return list(jax.local_devices())
    known = jax_devices()
    wanted = [DeviceName.parse(name) for name in names]
    if len(set(wanted)) < len(wanted) or not known.keys() >= set(wanted):
        raise ConfigError(f"devices={list(names)!r}: name some of {', '.join(map(str, known))}, each once.")
    return [known[name] for name in wanted]


def on_devices(devices: Sequence[Any]) -> tuple[Replicas, Training | None]:
    """The replicas of several devices of this process; how they train Keras models, or ``None`` without Keras."""
    replicas = DeviceReplicas(devices)
    if "keras" not in sys.modules:
        return replicas, None
    from choros.distribute.devices.training import DeviceTraining

    return replicas, DeviceTraining(replicas, devices)


class _Here(threading.local):
    """What this thread, if it is in a replica, has to reach the others with."""

    link: Link | None = None


@final
class DeviceReplicas(Replicas):
    """The devices of this process, each with one replica.

    Args:
        devices: JAX's; at least two, of one kind.
    """

    first = 0

    def __init__(self, devices: Sequence[Any]) -> None:
        self.count = self.local_count = len(devices)
        self._mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        self._arrays = DeviceArrays(self._mesh)
        self._memory = Memory()
        self._here = _Here()

    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a program; every number or array that ``function`` returns becomes a ``PerReplica``."""
        pattern, each, every = taken_apart(args, kwargs)
        for value in each:
            if len(value) != self.count:
                raise ConfigError(
                    f"a PerReplica of {len(value)} values was passed to strategy.run, and there are {self.count} "
                    "replicas."
                )
        if any(len({np.shape(part) for part in value}) > 1 for value in each):
            return self._run_threads(self._calling(strategy, function, pattern), each, every)
        own = [value.values[0] for value in each]

        def compiled(function: Callable[..., Any]) -> Compiled:
            call = self._calling(strategy, function, pattern)
            is_number = [np.ndim(part) == 0 for part in own]
            return Compiled(call, self._mesh, is_number, flow_of(call, self._mesh, own, every))

        program = self._memory.get(function, pattern.key, compiled)
        variables = self._arrays.of_variables(program.flow.variables) if program.flow else []
        whole = [self._arrays.whole(value) for value in each]
        leaves, numbers, tree, assigned = program(variables, whole, self._arrays.alike(every))
        if program.flow:
            self._arrays.assign(program.flow.outputs, assigned)
        parts = [self._arrays.parts(leaf, numbers=number) for leaf, number in zip(leaves, numbers, strict=True)]
        return jax.tree.unflatten(tree, parts)

    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        """On the first device; in a ``merge_call``, in the program."""
        if (link := self._here.link) is not None:
            return jax.tree.map(lambda leaf: link.reduce(op, leaf, axis), value)
        return jax.tree.map(lambda leaf: _reduced(op, self._on_first(leaf), axis), by_leaf(value))

    def gather(self, value: Any, axis: int) -> Any:
        """Likewise."""
        if self._here.link is not None:
            return self.all_gather(value, axis)
        return jax.tree.map(lambda leaf: _gathered(self._on_first(leaf), axis), by_leaf(value))

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """A psum of each leaf."""
        link = self._link("all_reduce")
        return jax.tree.map(lambda leaf: link.all_reduce(op, leaf), value)

    def all_gather(self, value: Any, axis: int) -> Any:
        """An all-gather of each leaf."""
        link = self._link("all_gather")
        return jax.tree.map(lambda leaf: link.all_gather(leaf, axis), value)

    def merge_call(
        self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Goes on in the program: ``function`` is called once for all replicas, with each one's own arguments."""
        with enter_scope(strategy):
            return function(strategy, *args, **kwargs)

    def _calling(self, strategy: Any, function: Callable[..., Any], pattern: Pattern) -> Call:
        """``function`` in replica context, with arguments of this ``pattern``."""

        def call(link: Link, each: Sequence[Any], every: Sequence[Any]) -> Any:
            args, kwargs = pattern.put_together(each, every)
            with self._linked(link), enter_scope(strategy, ReplicaContext(strategy, link.replica)):
                return function(*args, **kwargs)

        return call

    def _run_threads(self, call: Call, each: Sequence[PerReplica], every: Sequence[Any]) -> Any:
        devices = self._arrays.devices
        flow = flow_of(call, self._mesh, [value.values[0] for value in each], every)

        def replica(communicator: Communicator) -> tuple[Any, list[Any]]:
            link = Threads(communicator)
            with jax.default_device(devices[0]):
                own = jax.device_put([value.values[link.replica] for value in each], devices[0])
                shared = jax.device_put(list(every), devices[0])
                if flow is None:
                    return call(link, own, shared), []
                values = [jax.device_put(variable.value, devices[0]) for variable in flow.variables]
                first = link.replica == 0
                return flow.through(values, first, lambda: call(link, own, shared), link.all_reduce)

        done = run_threads(replica, self.count)
        if flow is not None:
            for variable, value in zip(flow.outputs, done[0][1], strict=True):
                variable.assign(value)

        def together(*parts: Any) -> PerReplica:
            return PerReplica([jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)])

        return jax.tree.map(together, *(results for results, _ in done))

    @contextmanager
    def _linked(self, link: Link) -> Iterator[None]:
        outer, self._here.link = self._here.link, link
        try:
            yield
        finally:
            self._here.link = outer

    def _link(self, method: str) -> Link:
        if self._here.link is None:
            raise StrategyError(
                f"{method} was called outside of the replicas: call it in a function that strategy.run(fn, args=…) "
                "calls, in the same thread."
            )
        return self._here.link

    def _on_first(self, leaf: Any) -> list[Any]:
        """A value of each replica, on the first device; a plain value counts once for each."""
        values = leaf.values if isinstance(leaf, PerReplica) else (leaf,) * self.count
        return [jax.device_put(value, self._arrays.devices[0]) for value in values]


def _reduced(op: ReduceOp, values: Sequence[Any], axis: int | None) -> Any:
    if axis is None:
        if len({value.shape for value in values}) > 1:
            raise ConfigError(
                f"reduce(axis=None) adds the replicas' values element by element, and they have the shapes "
                f"{', '.join(str(value.shape) for value in values)}: pass axis=0 to reduce over the examples as well."
            )
        return (jnp.sum if op is ReduceOp.SUM else jnp.mean)(jnp.stack(values), 0)
    axes = [axis_of(value, axis, "reduce") for value in values]
    total = jnp.sum(jnp.stack([value.sum(axis) for value, axis in zip(values, axes, strict=True)]), 0)
    if op is ReduceOp.SUM:
        return total
    return mean_of(total, sum(value.shape[axis] for value, axis in zip(values, axes, strict=True)))


def _gathered(values: Sequence[Any], axis: int) -> Any:
    axes = {axis_of(value, axis, "gather") for value in values}
    others = {tuple(np.delete(value.shape, list(axes))) for value in values}
    if len(axes) > 1 or len(others) > 1:
        raise ConfigError(
            f"gather(axis={axis}): the replicas' values have the shapes "
            f"{', '.join(str(value.shape) for value in values)}; they may differ in that dimension alone."
        )
    return jnp.concatenate(values, axes.pop())
