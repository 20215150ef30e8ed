"""The reduction of the gradients of an optax transformation, whole or in slices, by one host call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.arrays import ArraySpec
from choros.arrays.jax_arrays import ADAPTER
from choros.comm import Array
from choros.comm.request import JOINED
from choros.errors import ConfigError, MismatchError, NotInitializedError
from choros.jax.collectives import paths_of
from choros.jax.division import of_models, trained_of
from choros.parallel.identical import check_identical
from choros.parallel.reduce.gradients import GradientKind, GradientLayout
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.structure import with_items

_ADVICE = "Start all ranks from the same values: params = broadcast_parameters(params) before training."
#: Numbers that the host returns to the compiled step: one, and one for each model of ``jax.vmap``.
_FLAG = ArraySpec((), np.dtype(np.int32), batched=False)
_NUMBER = ArraySpec((), np.dtype(np.int32))


@final
class GradientReduction:
    """Reduces one transformation's gradients; ``layout`` is from ``init``, as a rank may join before it has a gradient.
    ``shards_state``: in slices, which ranks that have joined do not have.
    """

    def __init__(self, reducer: GradientReducer, *, shards_state: bool = False) -> None:
        self.reducer = reducer
        self.shards_state = shards_state
        self.layout: GradientLayout = ()

    def know(self, gradients: Mapping[int, Any]) -> None:
        """Notes the layout of these gradients, or of their parameters."""
        self.layout = tuple(GradientKind(leaf.shape, np.dtype(leaf.dtype)) for leaf in gradients.values())

    def check_initialized(self) -> None:
        """An error before ``init()``."""
        if self.reducer.process_set.included() is None:
            raise NotInitializedError("update() of distributed()")

    def reduce(self, updates: Any, params: Any, examples: Any) -> Any:
        """Returns the gradients ``updates`` reduced over the ranks; from time to time, ranks compare ``params``."""
        self.check_initialized()
        leaves, structure = jax.tree.flatten(updates)
        trained = trained_of(updates)
        if not self.reducer.active or not trained:
            return updates
        if not self.layout:  # ``init`` was not called, as the state was read from a file
            self.know(trained)
        outputs = [*map(ADAPTER.spec, trained.values()), _FLAG]
        arrays = [_as_count(examples), *trained.values()]
        keeps = self.reducer.may_repeat

        def on_host(hosts: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
            return self._reduced(
                hosts, lambda gradients, count: self.reducer.reduce(gradients, examples=count, out=out)
            )

        *reduced, due = ADAPTER.host_call(on_host, arrays, outputs, replaced=len(trained), keeps=keeps)
        self._compare_if(due, params)
        return structure.unflatten(with_items(leaves, trained, reduced))

    def reduce_slices(
        self, gradients: Sequence[Any], layout: GradientLayout, shapes: Sequence[Any], params: Any, examples: Any
    ) -> tuple[list[Any], Any]:
        """Returns this rank's items of the reduced gradients, in ``shapes`` (``None``: it has none), and a number, 0,
        that is known only when the step runs.
        """
        outputs = [
            ArraySpec(shape, each.dtype) for shape, each in zip(shapes, layout, strict=True) if shape is not None
        ]

        def on_host(hosts: Sequence[Array]) -> list[Array]:
            models = hosts[0].shape

            def reduce(gradients: Sequence[Array], count: int) -> list[Array]:
                kinds = tuple(of_models(each, models) for each in layout)
                items = self.reducer.reduce(gradients, examples=count, layout=kinds)
                own = [each for each, shape in zip(items, shapes, strict=True) if shape is not None]
                return [each.reshape((*spec.shape, *models)) for each, spec in zip(own, outputs, strict=True)]

            with slices_of_all():
                return [np.zeros(models, np.int32), *self._reduced(hosts, reduce)]

        arrays = [_as_count(examples), *gradients]
        number, *reduced, due = ADAPTER.host_call(on_host, arrays, [_NUMBER, *outputs, _FLAG])
        self._compare_if(due, params)
        return reduced, number

    def _reduced(
        self, hosts: Sequence[Array], reduce: Callable[[Sequence[Array], int], Sequence[Array]]
    ) -> list[Array]:
        counts, *gradients = hosts
        if (counts != counts.flat[0]).any():  # several models, under jax.vmap
            raise ConfigError("update(examples=…) cannot differ between the models of jax.vmap: pass one number.")
        reduced = reduce(gradients, int(counts.flat[0]))
        return [*reduced, np.asarray(self.reducer.due is not None, np.int32)]

    def _compare_if(self, due: Any, params: Any) -> None:
        """Checks that all ranks have the same ``params``, which the update of the step before has computed."""
        compared = trained_of(params)
        if not compared:
            return
        paths = [paths_of(params)[index] for index in compared]

        def on_host(hosts: Sequence[Array]) -> list[Array]:
            due = self.reducer.due
            if due is not None:
                process_set = self.reducer.process_set
                check_identical(paths, hosts, replace(due, before=True), advice=_ADVICE, process_set=process_set)
            return [np.asarray(0, np.int32)]

        ADAPTER.host_call_if(due, on_host, list(compared.values()), [_FLAG])


@contextmanager
def slices_of_all() -> Iterator[None]:
    """A context whose error, if a rank has joined and so makes no update of its slices, says what to do."""
    try:
        yield
    except MismatchError as error:
        if f"{JOINED} at" not in str(error):
            raise
        raise MismatchError(
            f"{error}\nWith shard_state=True each rank makes the updates of its slices, and none can join before the "
            "last step: give every rank a batch in each step, maybe of rows that do not count, with examples=0."
        ) from None


def _as_count(examples: Any) -> Any:
    count = jnp.asarray(examples)
    if count.shape or not jnp.issubdtype(count.dtype, jnp.integer):
        raise ConfigError(
            f"update(examples=…) must be the number of examples in the batch, an integer; given was {count.dtype} of "
            f"shape {count.shape}."
        )
    return count
