"""A function compiled for all replicas of a process, and the memory of what has been compiled."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from choros.distribute.devices.collectives import AXIS, Link, Program
from choros.distribute.devices.weak_map import WeakMap

if TYPE_CHECKING:
    from choros.distribute.devices.keras_flow import Flow

__all__ = ["Call", "Compiled", "Memory", "flow_of"]

#: Calls the user's function for the replica of a link, given this replica's values and those of every replica.
Call = Callable[[Link, Sequence[Any], Sequence[Any]], Any]

_DEALT_OUT, _ALIKE = PartitionSpec(AXIS), PartitionSpec()


def flow_of(call: Call, mesh: Mesh, each: Sequence[Any], every: Sequence[Any]) -> Flow | None:
    """The Keras variables that a function reads and assigns; ``None`` without Keras.

    Args:
        call: the function.
        mesh: the replicas'.
        each: one replica's own arguments.
        every: the others.
    """
    if "keras" not in sys.modules:
        return None
    from choros.distribute.devices.keras_flow import record

    def trace(watched: Callable[[Callable[[], Any]], Any]) -> None:
        def on_device(each: Sequence[Any], every: Sequence[Any]) -> None:
            watched(lambda: call(Program(), each, every))

        specs = {"in_specs": _ALIKE, "out_specs": _ALIKE, "check_vma": False}
        jax.eval_shape(jax.shard_map(on_device, mesh=mesh, **specs), each, every)

    return record(trace)


@final
class Compiled:
    """One program for all replicas.

    Attributes:
        flow: the Keras variables that are its first inputs, and its last outputs.

    Args:
        call: the function.
        mesh: the replicas'.
        is_number: of the replicas' own arguments, which have no dimensions.
        flow: see above.
    """

    def __init__(self, call: Call, mesh: Mesh, is_number: Sequence[bool], flow: Flow | None) -> None:
        self.flow = flow
        self._call = call
        self._is_number = tuple(is_number)
        #: Of the function's results, which have no dimensions; known when it has been traced.
        self._gives_number: tuple[bool, ...] = ()
        specs = {"in_specs": (_ALIKE, _DEALT_OUT, _ALIKE), "out_specs": (_DEALT_OUT, _ALIKE), "check_vma": False}
        self._compiled = jax.jit(jax.shard_map(self._on_device, mesh=mesh, **specs))

    def __call__(
        self, variables: Sequence[Any], each: Sequence[Any], every: Sequence[Any]
    ) -> tuple[list[Any], tuple[bool, ...], Any, list[Any]]:
        """Runs it.

        Returns:
            The leaves of the results, over the devices; which of them are numbers; their tree; and what is to be
            assigned to the flow's outputs.
        """
        results, assigned = self._compiled(list(variables), list(each), list(every))
        leaves, tree = jax.tree.flatten(results)
        return leaves, self._gives_number, tree, assigned

    def _on_device(self, variables: Any, each: Any, every: Any) -> tuple[Any, list[Any]]:
        link = Program()
        own = [array.reshape(()) if number else array for array, number in zip(each, self._is_number, strict=True)]
        assigned: list[Any] = []
        if self.flow is None:
            results = self._call(link, own, every)
        else:
            results, assigned = self.flow.through(
                variables, link.replica == 0, lambda: self._call(link, own, every), link.all_reduce
            )
        results = jax.tree.map(jnp.asarray, results)
        self._gives_number = tuple(leaf.ndim == 0 for leaf in jax.tree.leaves(results))
        return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.reshape(1), results), assigned


@final
class Memory:
    """What has been compiled for functions that still exist; a method counts as long as its object does."""

    def __init__(self) -> None:
        self._programs: WeakMap[dict[Any, Compiled]] = WeakMap()

    def get(self, function: Callable[..., Any], key: Any, make: Callable[[Callable[..., Any]], Compiled]) -> Compiled:
        """The program of ``function`` for arguments of this ``key``.

        Args:
            function: the user's.
            key: see ``Pattern``.
            make: compiles what it is given: the function, which it must not keep alive.
        """
        owner: Any = function
        method = None
        if isinstance(function, types.MethodType):
            owner, method = function.__self__, function.__func__
        reference = weakref.ref(owner)

        def weakly(*args: Any, **kwargs: Any) -> Any:
            own = reference()
            return own(*args, **kwargs) if method is None else method(own, *args, **kwargs)  # type: ignore[misc]

        programs = self._programs.get(owner)
        if programs is None:
            self._programs[owner] = programs = {}
        if (method, key) not in programs:
            programs[method, key] = make(weakly)
        return programs[method, key]
