"""The SPMD trainer: ``fit``, ``evaluate`` and ``predict`` of a Keras model on JAX, run on the devices of a mesh.

Keras' own trainer still controls epochs, callbacks and compilation. Two of its functions are wrapped, on one model
object; neither wrapper is saved with the model::

    fit ─► train_function(state, iterator)     wrapped: state and batches become global arrays, in this module
             └─ jit ─► train_step(state, data) wrapped: takes the examples out of the global batch
                                               ▲ Keras', or the user's own

``test`` and ``predict`` are wrapped in the same way. Training runs on the whole mesh: its processes agree on every
batch, with one control message. Evaluation and prediction run on this process's devices only: one process may
evaluate alone, and ``predict`` returns a row for each row of its data, in order.

Processes may have different numbers of batches::

    process 0                    process 1
    batch 1 ─ 8 examples ─┐  ┌─ 8 examples ─ batch 1
    batch 2 ─ 8 examples ─┼──┼─ 3 examples ─ batch 2
    batch 3 ─ 5 examples ─┼──┼─ 0 examples ─ join()      runs the same step, with the learning rate that
              rate ───────┼──┼──────► rate               process 0's callbacks have set meanwhile
    join()  ─ 0 examples ─┴──┴─ 0 examples ─ join()      no process has examples: the epoch is over
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh

from choros.errors import ConfigError
from choros.training.batch_plan import BatchPlan
from choros.training.global_arrays import (
    GlobalBatch,
    assemble,
    constrain_replicated,
    count_examples,
    devices_by_process,
    examples_of,
    is_on,
    local_mesh,
    replicate,
    unreplicate,
)
from choros.training.keras_internals import (
    JAX_STATE,
    innermost,
    jax_state,
    learning_rate_of,
    put_jax_state,
    unsynced_jax_state,
)

__all__ = ["Peers", "SpmdTrainer"]

_OPTIMIZER = JAX_STATE.index("optimizer_variables")


class Peers(ABC):
    """Communication between the processes of a mesh; all processes must call the same methods in the same order."""

    @abstractmethod
    def agree(self, layout: str, examples: int, problem: ConfigError | None) -> Sequence[int]:
        """Returns the number of examples that each process contributes to the next step.

        Args:
            layout: a description of the batch's arrays, which must be the same on all processes.
            examples: the number that this process contributes.
            problem: an error in this process's call: raised here; the other processes raise a ``MismatchError``.
        """

    @abstractmethod
    def share(self, number: float, root: int) -> float:
        """Returns the ``number`` of the process ``root``."""


@final
class SpmdTrainer:
    """Runs the steps of a model on the devices of a mesh; created once for a model, which it changes in place.

    Args:
        model: a compiled Keras model, on JAX.
        mesh: one-dimensional, in the order of the processes.
        peers: the communication with the processes of the mesh.
        is_shared: returns whether the model trains with them; called again when the model has been compiled again.

    Attributes:
        local_devices: the number of the mesh's devices that belong to this process.

    Raises:
        ConfigError: ``keras.distribution`` is in use, which shards batches itself.
    """

    def __init__(self, model: Any, mesh: Mesh, peers: Peers, is_shared: Callable[[], bool]) -> None:
        if keras.distribution.distribution() is not None:
            raise ConfigError(
                "keras.distribution.set_distribution was called, but choros already shards this model's batches: "
                "remove that call."
            )
        self._model = model
        self._mesh = mesh
        self._peers = peers
        self._is_shared = is_shared
        self._devices = devices_by_process(mesh)
        self._layout = ""
        self._empty: Any = None
        self._step: Any = None
        self._rate = 0.0
        self._active: list[int] = []
        own = local_mesh(mesh)
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
        """Whether steps are compiled; eager operations (``run_eagerly``) stay on one device.

        Of several eager operations that wait for other processes, two processes may start different ones first.
        """
        return bool(self._model.jit_compile and not self._model.run_eagerly)

    def join(self) -> int | None:
        """Participates with empty batches until no process has batches left; every process must call it.

        Returns:
            A process that contributed examples to the last step, if another process did not: that process may have
            missed changes that callbacks made to the weights or the optimizer. ``None`` if all contributed.
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
        counts = tuple(self._peers.agree(self._layout, examples, problem))
        if not any(counts):
            return None
        self._active = [process for process, count in enumerate(counts) if count]
        if len(self._active) < len(counts):
            self._rate = self._peers.share(self._rate, self._active[0])
        return BatchPlan(counts, self._devices)

    def _store_rate(self, state: Any) -> None:
        """Stores the learning rate of a state read from the model's variables, which callbacks may have set."""
        if (index := self._rate_index()) is not None:
            self._rate = float(state[_OPTIMIZER][index])

    def _with_rate(self, state: Any) -> Any:
        """Returns ``state`` with the learning rate that was stored or shared."""
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
        """Wraps the step that Keras compiles, and the function that calls it."""
        model = self._model
        step, make = getattr(model, f"{kind}_step"), getattr(model, f"make_{kind}_function")

        @functools.wraps(step)
        def on_examples(state: Any, batch: Any) -> Any:
            if not isinstance(batch, GlobalBatch):
                return step(state, batch)
            return constrain_replicated(step(state, examples_of(batch, mesh)), mesh)

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
                if not _comes_from(mesh, state):
                    if kind == "train":
                        self._store_rate(state)
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


def _own_batches(iterator: Iterable[Any], mesh: Mesh) -> Iterator[GlobalBatch]:
    for data in iterator:
        yield assemble(data, BatchPlan((count_examples(data),), (mesh.size,)), mesh)


def _comes_from(mesh: Mesh, state: Any) -> bool:
    """Whether all of ``state`` is a result of a step on ``mesh``; otherwise all of it is the model's variables."""
    return all(is_on(part[0], mesh) for part in state if part)


def _unreplicate_on_sync(model: Any) -> None:
    """Unreplicates the state of Keras' training loop whenever Keras writes it back to the model's variables."""
    sync = model.jax_state_sync

    @functools.wraps(sync)
    def unreplicate_and_sync() -> None:
        if (state := unsynced_jax_state(model)) is not None:
            state.update({name: [unreplicate(value) for value in values] for name, values in state.items()})
        sync()

    model.jax_state_sync = unreplicate_and_sync
