"""How ``fit``, ``evaluate`` and ``predict`` of a Keras model on JAX are led over the devices of a mesh.

Keras' own trainer stays in charge: epochs, callbacks, compilation. Two of its seams are used, both on one model
object and neither saved with it::

    fit ─► train_function(state, iterator)     wrapped: state and batches become global arrays, here
             └─ jit ─► train_step(state, data) wrapped: takes the examples out of the global batch
                                               ▲ Keras', or the user's own

The same goes for ``test`` and ``predict``. Training runs over the whole mesh: its processes agree on every batch,
with one control message. Evaluation and prediction are this process's own affair, on its devices: one process may
evaluate alone, and ``predict`` returns the rows of the data it was given, in their order.

Processes may have different numbers of batches::

    process 0                    process 1
    batch 1 ─ 8 examples ─┐  ┌─ 8 examples ─ batch 1
    batch 2 ─ 8 examples ─┼──┼─ 3 examples ─ batch 2
    batch 3 ─ 5 examples ─┼──┼─ 0 examples ─ join()      takes the same step, at the learning rate that
              rate ───────┼──┼──────► rate               process 0's callbacks have set meanwhile
    join()  ─ 0 examples ─┴──┴─ 0 examples ─ join()      nobody has any: the epoch is over
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
    count_examples,
    devices_by_process,
    examples_of,
    gathered,
    is_on,
    local_mesh,
    replicated,
    spread,
)
from choros.training.keras_internals import (
    JAX_STATE,
    innermost,
    jax_state,
    learning_rate_of,
    put_jax_state,
    unsynced_jax_state,
)

__all__ = ["Peers", "SpreadModel"]

_OPTIMIZER = JAX_STATE.index("optimizer_variables")


class Peers(ABC):
    """How the processes of a mesh learn of each other; all must call each method alike, in the same order."""

    @abstractmethod
    def agree(self, layout: str, examples: int, problem: ConfigError | None) -> Sequence[int]:
        """How many examples each process brings to the next step.

        Args:
            layout: the batch's arrays in words, which must be the same everywhere.
            examples: how many this process brings.
            problem: raised here, and something in its place elsewhere.
        """

    @abstractmethod
    def share(self, number: float, root: int) -> float:
        """The ``number`` of the process ``root``."""


@final
class SpreadModel:
    """A model whose steps run on the devices of a mesh; made once a model, it changes the model in place.

    Args:
        model: a compiled Keras model, on JAX.
        mesh: one dimension, in the order of the processes.
        peers: the processes of the mesh.
        is_shared: whether the model now trains with them; asked anew when it has been compiled anew.

    Raises:
        ConfigError: ``keras.distribution`` is in use, which deals out batches itself.
    """

    def __init__(self, model: Any, mesh: Mesh, peers: Peers, is_shared: Callable[[], bool]) -> None:
        if keras.distribution.distribution() is not None:
            raise ConfigError(
                "keras.distribution.set_distribution was called, but this model's batches are dealt out already: leave "
                "it out."
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
        self._lead("train", mesh, self._global_batches)
        if own.size > 1:
            for kind in ("test", "predict"):
                self._lead(kind, own, functools.partial(_own_batches, mesh=own))
        _gather_on_sync(model)

    @property
    def is_in_use(self) -> bool:
        """Whether training is led over the mesh, and not a matter of this process."""
        return self._is_compiled and self._is_shared()

    @property
    def _is_compiled(self) -> bool:
        """Operations one by one (``run_eagerly``) stay on one device.

        Of several that wait for other processes at once, two processes need not begin with the same one.
        """
        return bool(self._model.jit_compile and not self._model.run_eagerly)

    def join(self) -> int | None:
        """Goes along with the processes that still have batches, until none has; every process must call it.

        Returns:
            A process that brought examples to the last step, if there is one that did not: it may have missed
            what callbacks did to the weights or the optimizer. ``None`` if all did.
        """
        model = self._model
        state = None
        while (plan := self._agree(0, None)) is not None:
            if state is None:
                state = spread(jax_state(model), self._mesh)
            batch = assemble(self._empty, plan, self._mesh)
            _, state = self._step(self._at_rate(state), iter([batch]))
        if state is not None:
            put_jax_state(model, state)
        active, self._active = self._active, []
        return active[0] if 0 < len(active) < len(self._devices) else None

    def _agree(self, examples: int, problem: ConfigError | None) -> BatchPlan | None:
        """The next batch of all processes; ``None`` if nobody has any."""
        told = tuple(self._peers.agree(self._layout, examples, problem))
        if not any(told):
            return None
        self._active = [process for process, count in enumerate(told) if count]
        if len(self._active) < len(told):
            self._rate = self._peers.share(self._rate, self._active[0])
        return BatchPlan(told, self._devices)

    def _note_rate(self, state: Any) -> None:
        """Keeps the learning rate of a state from the model's variables, which callbacks may have set."""
        if (place := self._place_of_rate()) is not None:
            self._rate = float(state[_OPTIMIZER][place])

    def _at_rate(self, state: Any) -> Any:
        """``state`` with the learning rate that was told."""
        place = self._place_of_rate()
        if place is None:
            return state
        variables = list(state[_OPTIMIZER])
        variables[place] = spread(jnp.asarray(self._rate, variables[place].dtype), self._mesh)
        return *state[:_OPTIMIZER], variables, *state[_OPTIMIZER + 1 :]

    def _place_of_rate(self) -> int | None:
        """Where the optimizer's variables have the learning rate; ``None`` if it is a schedule of its own."""
        optimizer = self._model.optimizer
        rate = learning_rate_of(innermost(optimizer))
        return next((place for place, variable in enumerate(optimizer.variables) if variable is rate), None)

    def _lead(self, kind: str, mesh: Mesh, batches: Callable[[Iterable[Any]], Iterator[GlobalBatch]]) -> None:
        """Wraps the step that is compiled, and the function that calls it."""
        model = self._model
        step, make = getattr(model, f"{kind}_step"), getattr(model, f"make_{kind}_function")

        @functools.wraps(step)
        def on_examples(state: Any, batch: Any) -> Any:
            if not isinstance(batch, GlobalBatch):
                return step(state, batch)
            return replicated(step(state, examples_of(batch, mesh)), mesh)

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
                        self._note_rate(state)
                    state = spread(state, mesh)
                outputs, state = inner(state, batches(iterator))
                return gathered(outputs), state

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
    """Whether a step on ``mesh`` has given ``state``, or else the model's variables; never a part of it."""
    return all(is_on(part[0], mesh) for part in state if part)


def _gather_on_sync(model: Any) -> None:
    """When Keras hands the state of its loop back to the model's variables, they become ordinary arrays."""
    sync = model.jax_state_sync

    @functools.wraps(sync)
    def gather_and_sync() -> None:
        if (state := unsynced_jax_state(model)) is not None:
            state.update({name: [gathered(value) for value in values] for name, values in state.items()})
        sync()

    model.jax_state_sync = gather_and_sync
