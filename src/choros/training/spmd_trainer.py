"""The SPMD trainer: ``fit``, ``evaluate`` and ``predict`` of a Keras model on JAX, run on the devices of a mesh.

Keras' own trainer still controls epochs, callbacks, compilation; two functions of a model are wrapped, unsaved::

    fit ─► train_function(state, iterator)     wrapped: state and batches become global arrays, in this module
             └─ jit ─► train_step(state, data) wrapped: takes the examples out of the global batch
                                               ▲ Keras', or the user's own

``test`` and ``predict`` likewise, but on this process's devices only: one process may evaluate alone. Training
runs on the whole mesh: processes agree on every batch, with one message, and may have different numbers of them::

    process 0                    process 1
    batch 1 ─ 8 examples ─┐  ┌─ 8 examples ─ batch 1
    batch 2 ─ 8 examples ─┼──┼─ 3 examples ─ batch 2
    batch 3 ─ 5 examples ─┼──┼─ 0 examples ─ join()      runs the same step, with the learning rate that
              rate ───────┼──┼──────► rate               process 0's callbacks have set meanwhile
    join()  ─ 0 examples ─┴──┴─ 0 examples ─ join()      no process has examples: the epoch is over
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from choros.comm import ProcessSet, Request
from choros.errors import ConfigError
from choros.training.keras_internals.fit import JAX_STATE, jax_state, put_jax_state, unsynced_jax_state
from choros.training.keras_internals.models import innermost, learning_rate_of

_OPTIMIZER = JAX_STATE.index("optimizer_variables")


@final
class SpmdTrainer:
    """Runs a JAX model's steps on a mesh, changing it once, in place; ConfigError if ``keras.distribution`` is used.

    The processes of a mesh of several, which are those of ``process_set``, make the same calls in the same order.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        process_set: ProcessSet | None = None,
        is_shared: Callable[[], bool] = lambda: True,
    ) -> None:
        if keras.distribution.distribution() is not None:
            raise ConfigError(
                "keras.distribution.set_distribution was called, but choros already shards this model's batches: "
                "remove that call."
            )
        self._model = model
        self._mesh = mesh
        self._process_set = process_set
        self._is_shared = is_shared
        owners = [device.process_index for device in mesh.devices.flat]
        #: The number of devices in each process, in the order of the mesh.
        self._devices = tuple(owners.count(owner) for owner in dict.fromkeys(owners))
        self._layout = ""
        self._empty: Any = None
        self._step: Any = None
        self._rate = 0.0
        self._active: list[int] = []
        own = Mesh(np.array(mesh.local_devices), mesh.axis_names)
        self.local_devices = own.size
        self._wrap_step("train", mesh, self._global_batches)
        if own.size > 1:
            for kind in ("test", "predict"):
                self._wrap_step(kind, own, functools.partial(_own_batches, mesh=own))
        _unreplicate_on_sync(model)

    @property
    def is_in_use(self) -> bool:
        """Whether training steps run on the whole mesh, not on this process alone."""
        return self._is_compiled and self._is_shared()

    @property
    def _is_compiled(self) -> bool:
        """Whether steps are compiled; eager ones stay on one device: processes may order waiting ones differently."""
        return bool(self._model.jit_compile and not self._model.run_eagerly)

    def join(self) -> int | None:
        """Participates with empty batches until no process has any left; all call it. Returns one with examples in
        the last step if another had none, which may have missed changes by its callbacks; ``None`` if all had.
        """
        model = self._model
        state = None
        while (plan := self._agree(0, None)) is not None:
            if state is None:
                state = replicate(jax_state(model), self._mesh)
            batch = assemble(self._empty, plan, self._mesh)
            _, state = self._step(self._with_rate(state), iter([batch]))
        if state is not None:
            put_jax_state(model, state)
        active, self._active = self._active, []
        return active[0] if 0 < len(active) < len(self._devices) else None

    def _agree(self, examples: int, problem: ConfigError | None) -> BatchPlan | None:
        """Returns the plan of the next global batch; ``None`` if no process has examples."""
        if self._process_set is None:
            if problem is not None:
                raise problem
            return BatchPlan((examples,), self._devices) if examples else None
        communicator, request = self._process_set.communicator, _request(self._layout)
        counts = tuple(communicator.agree(request, value=examples, problem=problem))
        if not any(counts):
            return None
        self._active = [process for process, count in enumerate(counts) if count]
        if len(self._active) < len(counts):
            self._rate = float(communicator.broadcast(np.float64(self._rate), self._active[0], name="learning rate"))
        return BatchPlan(counts, self._devices)

    def _with_rate(self, state: Any) -> Any:
        index = self._rate_index()
        if index is None:
            return state
        variables = list(state[_OPTIMIZER])
        variables[index] = replicate(jnp.asarray(self._rate, variables[index].dtype), self._mesh)
        return *state[:_OPTIMIZER], variables, *state[_OPTIMIZER + 1 :]

    def _rate_index(self) -> int | None:
        """The index of the learning rate in the optimizer's variables; ``None`` if the rate is a schedule."""
        optimizer = self._model.optimizer
        rate = learning_rate_of(innermost(optimizer))
        return next((index for index, variable in enumerate(optimizer.variables) if variable is rate), None)

    def _wrap_step(self, kind: str, mesh: Mesh, batches: Callable[[Iterable[Any]], Iterator[GlobalBatch]]) -> None:
        model = self._model
        step, make = getattr(model, f"{kind}_step"), getattr(model, f"make_{kind}_function")

        @functools.wraps(step)
        def on_examples(state: Any, batch: Any) -> Any:
            if not isinstance(batch, GlobalBatch):
                return step(state, batch)
            return jax.lax.with_sharding_constraint(step(state, examples_of(batch, mesh)), _replicated_sharding(mesh))

        @functools.wraps(make)
        def make_function(force: bool = False) -> None:
            if getattr(model, f"{kind}_function") is not None and not force:
                return
            make(force=True)
            if not (self.is_in_use if kind == "train" else self._is_compiled):
                return
            inner = getattr(model, f"{kind}_function")
            if kind == "train":
                self._step = inner

            def on_mesh(state: Any, iterator: Any) -> Any:
                if any(len(part[0].sharding.device_set) != mesh.size for part in state if part):
                    # The state is that of the model's variables, not of a step on the mesh: callbacks may have set it.
                    if kind == "train" and (index := self._rate_index()) is not None:
                        self._rate = float(state[_OPTIMIZER][index])
                    state = replicate(state, mesh)
                outputs, state = inner(state, batches(iterator))
                return unreplicate(outputs), state

            setattr(model, f"{kind}_function", on_mesh)

        setattr(model, f"{kind}_step", on_examples)
        setattr(model, f"make_{kind}_function", make_function)
        setattr(model, f"{kind}_function", None)

    def _global_batches(self, iterator: Iterable[Any]) -> Iterator[GlobalBatch]:
        for data in iterator:
            problem = None
            try:
                count = count_examples(data)
            except ConfigError as error:
                count, problem = 0, error
            layout = ", ".join(
                f"{leaf.dtype}[*{''.join(f', {n}' for n in leaf.shape[1:])}]" for leaf in jax.tree.leaves(data)
            )
            if layout != self._layout:
                self._layout = layout
                self._empty = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), data)
            if (plan := self._agree(count, problem)) is not None:
                yield assemble(data, plan, self._mesh)


@functools.lru_cache(maxsize=16)
def _request(layout: str) -> Request:
    return Request("batch", layout)


def _own_batches(iterator: Iterable[Any], mesh: Mesh) -> Iterator[GlobalBatch]:
    for data in iterator:
        yield assemble(data, BatchPlan((count_examples(data),), (mesh.size,)), mesh)


def _unreplicate_on_sync(model: Any) -> None:
    """Unreplicates the state of Keras' training loop whenever Keras writes it back to the model's variables."""
    sync = model.jax_state_sync

    @functools.wraps(sync)
    def unreplicate_and_sync() -> None:
        if (state := unsynced_jax_state(model)) is not None:
            state.update({name: [unreplicate(value) for value in values] for name, values in state.items()})
        sync()

    model.jax_state_sync = unreplicate_and_sync


# Arrays over the devices of a mesh; process 0 has three examples, process 1 two, and each has two devices:
#
#              process 0              process 1
#     host     a b c                  d e
#              │ the same number of rows for each device, enough for all examples: 2
#              ▼
#     device   [a b]    [c ·]         [d e]    [· ·]          padded, so that all shards have one shape
#     ─────────┼────────┼─────────────┼────────┼───────── into the compiled step
#     device   [a b]    [c d]         [e]      []             the examples alone, in this order, sharded again
#
# XLA shards again inside the step, where shapes may differ, so all is computed from exactly the global batch, not
# with weights of zero; batches that divide equally are passed as they are. Between steps Keras' variables stay
# ordinary arrays on this process's first device: callbacks and ``evaluate`` on one rank do not see the mesh.


@dataclass(frozen=True)
class BatchPlan:
    """Which rows of a global batch are examples, by each process's examples and devices; the same on every process.

    >>> plan = BatchPlan(examples=(3, 2), devices=(2, 2))
    >>> plan.rows, plan.is_even
    (2, False)
    >>> plan.index().tolist()
    [0, 1, 2, 4, 5]
    """

    examples: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows on each device."""
        return max(-(-count // devices) for count, devices in zip(self.examples, self.devices, strict=True))

    @property
    def is_even(self) -> bool:
        """Whether every row is an example."""
        return sum(self.examples) == self.rows * sum(self.devices)

    def index(self) -> NDArray[np.int32]:
        """The indices of the rows that are examples."""
        starts = np.cumsum((0, *self.devices[:-1])) * self.rows
        ranges = [np.arange(start, start + count) for start, count in zip(starts, self.examples, strict=True)]
        return np.concatenate(ranges).astype(np.int32)


class GlobalBatch(NamedTuple):
    """A batch on a mesh: global arrays sharded by rows, and the indices of those that are examples (``None``: all)."""

    rows: Any
    index: Any


def assemble(data: Any, plan: BatchPlan, mesh: Mesh) -> GlobalBatch:
    """Puts this process's examples on its devices, as its shard of a global batch; ``plan`` is the same on all."""
    by_rows = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def put(leaf: Any) -> Any:
        own = _padded(leaf, plan.rows * len(mesh.local_devices))
        return jax.make_array_from_process_local_data(by_rows, own, (plan.rows * mesh.size, *own.shape[1:]))

    return GlobalBatch(jax.tree.map(put, data), None if plan.is_even else replicate(plan.index(), mesh))


def examples_of(batch: GlobalBatch, mesh: Mesh) -> Any:
    """Returns the examples of a global batch, inside the compiled step."""
    if batch.index is None:
        return batch.rows
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def select(rows: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.take(rows, batch.index, axis=0, mode="clip"), sharding)

    return jax.tree.map(select, batch.rows)


def replicate(values: Any, mesh: Mesh) -> Any:
    """Returns arrays of one device, identical on all processes, as arrays replicated on every device of the mesh."""
    return jax.make_array_from_process_local_data(_replicated_sharding(mesh), values)


def unreplicate(values: Any) -> Any:
    """Undoes ``replicate``: returns this process's first copy of each array; other values are left as they are."""

    def first(array: Any) -> Any:
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
            return array.addressable_shards[0].data
        return array

    return jax.tree.map(first, values)


def count_examples(data: Any) -> int:
    """The examples in a batch of this process; ConfigError if it has none, numbers of rows differ, or it is sparse."""
    leaves = jax.tree.leaves(data, is_leaf=_is_sparse)
    if any(map(_is_sparse, leaves)):
        raise ConfigError("a batch has sparse arrays, which cannot be sharded over devices: convert them to dense.")
    lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        counts = ", ".join(sorted(str(*length) if length else "no number of" for length in lengths))
        raise ConfigError(f"the arrays of a batch have {counts} examples: all must have the same number, at least one.")
    ((count,),) = lengths
    return int(count)


def _is_sparse(leaf: Any) -> bool:
    return hasattr(leaf, "todense")


@functools.cache
def _replicated_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _padded(leaf: Any, rows: int) -> Any:
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    missing = rows - array.shape[0]
    if missing == 0:
        return array
    pad = jnp.pad if isinstance(array, jax.Array) else np.pad
    return pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
