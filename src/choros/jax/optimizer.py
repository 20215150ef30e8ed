"""The distributed optimizer: an optax transformation that first reduces the ranks' gradients.

::

    jax.grad ──► gradients ──► distributed(tx).update ──► one host call: GradientReducer ──► tx.update ──► updates
                                 examples=len(batch)      the mean over all ranks' examples

The state is that of ``tx``: a checkpoint of it can be used without choros.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArraySpec
from choros.arrays.jax_arrays import JaxArrays
from choros.comm import ProcessSet, Reduction, global_process_set, joining
from choros.comm.fusion import Layout
from choros.errors import ConfigError, NotInitializedError
from choros.jax.collectives import paths_of
from choros.parallel.compression import Compression, Compressor
from choros.parallel.identical import check_identical
from choros.parallel.reduce.plan import ReduceConfig, indices_of_groups
from choros.parallel.reduce.reducer import GradientReducer

Array = NDArray[Any]
_ADVICE = "Start all ranks from the same values: params = broadcast_parameters(params) before training."
#: A number that the host returns to the compiled step.
_FLAG = ArraySpec((), np.dtype(np.int32), batched=False)
_ADAPTER = JaxArrays()


@final
class _GradientReduction:
    """Reduces one transformation's gradients; ``layout`` is from ``init``: a rank may join before it has a gradient."""

    def __init__(self, reducer: GradientReducer) -> None:
        self.reducer = reducer
        self.layout: Layout | None = None

    def reduce(self, updates: Any, params: Any, examples: Any) -> Any:
        """Returns the gradients ``updates`` reduced over the ranks; from time to time, ranks compare ``params``."""
        if self.reducer.config.process_set.included() is None:
            raise NotInitializedError("update() of distributed()")
        leaves, structure = jax.tree.flatten(updates)
        trained = _trained(updates)
        if not self.reducer.active or not trained:
            return updates
        compared = _trained(params)
        paths = [paths_of(params)[index] for index in compared]
        outputs = [_ADAPTER.spec(gradient) for gradient in trained.values()]
        arrays = [_as_count(examples), *trained.values()]
        outputs.append(_FLAG)
        keeps = self.reducer.may_repeat
        *reduced, due = _ADAPTER.host_update(self._on_host, arrays, outputs, replaced=len(trained), keeps=keeps)
        self._compare_if(due, paths, list(compared.values()))
        for index, gradient in zip(trained, reduced, strict=True):
            leaves[index] = gradient
        return structure.unflatten(leaves)

    def _on_host(self, hosts: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        counts, *gradients = hosts
        if (counts != counts.flat[0]).any():  # several models, under jax.vmap
            raise ConfigError("update(examples=…) cannot differ between the models of jax.vmap: pass one number.")
        reduced = self.reducer.reduce(gradients, examples=int(counts.flat[0]), out=out)
        return [*reduced, np.asarray(self.reducer.due is not None, np.int32)]

    def _compare_if(self, due: Any, paths: list[str], values: list[Any]) -> None:
        """Checks that all ranks have the same ``values``, which the update of the step before has computed."""
        if not values:
            return

        def on_host(hosts: Sequence[Array]) -> list[Array]:
            due = self.reducer.due
            if due is not None:
                process_set = self.reducer.config.process_set
                check_identical(paths, hosts, replace(due, before=True), advice=_ADVICE, process_set=process_set)
            return [np.asarray(0, np.int32)]

        _ADAPTER.host_call_if(due, on_host, values, [_FLAG])


#: Those of the transformations of this process that are in use, for ``join``.
_reductions: weakref.WeakSet[_GradientReduction] = weakref.WeakSet()


def distributed(
    tx: Any,
    *,
    op: Reduction = Reduction.AVERAGE,
    compression: Compressor = Compression.none,
    gradient_predivide_factor: float = 1.0,
    groups: int = 0,
    process_set: ProcessSet = global_process_set,
    name: str = "",
) -> Any:
    """Returns an optax transformation that reduces gradients over the ranks and then applies ``tx``.

    Clipping, weight decay and all other parts of ``tx`` receive the global gradient. ``update`` has one more argument::

        updates, state = tx.update(gradients, state, params, examples=len(batch))

    ``examples`` is the number of examples in this rank's batch, an integer that may be computed inside ``jax.jit``. The
    gradients of the ranks' mean losses are weighted by it, so that ranks may have batches of different sizes; 0 is a
    batch that counts nowhere. Without it all ranks have the same weight. In ``update`` of the second step, and of each
    hundredth, ranks compare their ``params``.

    Args:
        tx: an optax transformation, or ``optax.MultiSteps``.
        op: ``Average`` (over examples) or ``Sum``.
        compression: how gradients are sent: ``none``, ``fp16`` or one of the others in ``Compression``.
        gradient_predivide_factor: averages divide by this factor before the sum, and by the rest after it.
        groups: the number of messages in which gradients are sent; 0 for as few as possible.
        process_set: the ranks that share gradients; on other ranks ``tx`` is applied to their own.
        name: distinguishes transformations of the same parameters that are used at the same time.

    Returns:
        An ``optax.GradientTransformationExtraArgs``, with the state of ``tx``.

    Raises:
        ImportError: optax is not installed.
        ConfigError: an argument is invalid.
        NotInitializedError: from ``update``, before ``init()``.
        MismatchError: from ``update``, if ranks have different gradients; inside ``jax.jit`` as JAX's error.
        DriftError: likewise, if they have different ``params``.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd, optax
        >>> hvd.init()
        >>> tx = hvd.distributed(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params, examples=32)
        >>> optax.apply_updates(params, updates)
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    tx = _checked(tx)
    config = ReduceConfig(
        op=op,
        compressor=compression,
        predivide_factor=gradient_predivide_factor,
        groups=indices_of_groups(groups, (), "parameter"),
        process_set=process_set,
    )
    reduction = _GradientReduction(GradientReducer(config, name))
    _reductions.add(reduction)
    return _reducing(tx, reduction)


def _checked(tx: Any) -> Any:
    """Returns ``tx`` as a transformation that takes extra arguments; an error if it is none."""
    try:
        import optax
    except ImportError as error:
        raise ImportError("choros.jax.distributed needs optax: pip install optax.") from error
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigError(
            f"distributed takes an optax transformation, not {tx!r}: create one, such as optax.adam(0.001)."
        )
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    return optax.with_extra_args_support(tx)


def _reducing(tx: Any, reduction: _GradientReduction) -> Any:
    import optax

    def init(params: Any) -> Any:
        reduction.layout = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in _trained(params).values())
        return tx.init(params)

    def update(updates: Any, state: Any, params: Any = None, *, examples: Any = 1, **extra_args: Any) -> Any:
        return tx.update(reduction.reduce(updates, params, examples), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def join() -> int:
    """Participates with zeros in the collectives of the other ranks until all ranks have joined (Horovod's ``join``).

    A rank calls it when it has no more batches. The steps of distributed optimizers then average over the ranks that
    still have batches; ``allreduce`` averages over all ranks, as in Horovod. Afterwards ranks that joined early have
    older parameters; all receive those of a rank that had the last batch by::

        params, state = broadcast_parameters((params, state), root_rank=join())

    Returns:
        A rank that was the last to join, the same on every rank.

    Raises:
        ConfigError: the transformations that are in use belong to different process sets.
        MismatchError: on all ranks, if another rank's collective needs all ranks, such as ``broadcast`` from this one.

    Example:
        >>> import choros.jax as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    jax.effects_barrier()
    active = [each for each in _reductions if each.layout is not None and each.reducer.active]
    sets = (each.reducer.config.process_set for each in active)
    process_set = joining.process_set_of(sets, "transformations that distributed() has returned")
    parts: dict[Any, Any] = {}
    for each in active:
        parts |= each.reducer.participation(each.layout or ())
    joining.join(process_set.communicator, parts)
    return process_set.ranks[joining.last_to_join(process_set.communicator)]


def _trained(tree: Any) -> dict[int, Any]:
    """The leaves that have gradients, with their indices: arrays of floating-point numbers."""
    leaves = enumerate(jax.tree.leaves(tree))
    arrays = {index: jnp.asarray(leaf) for index, leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray, float))}
    return {index: array for index, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.inexact)}


def _as_count(examples: Any) -> Any:
    count = jnp.asarray(examples)
    if count.shape or not jnp.issubdtype(count.dtype, jnp.integer):
        raise ConfigError(
            f"update(examples=…) must be the number of examples in the batch, an integer; given was {count.dtype} of "
            f"shape {count.shape}."
        )
    return count
