"""The distributed optimizer: an optax transformation that first reduces the ranks' gradients.

::

    jax.grad ──► gradients ──► distributed(tx).update ──► one host call: GradientReducer ──► tx.update ──► updates
                                 examples=len(batch)      the mean over all ranks' examples

The state is that of ``tx``: a checkpoint of it can be used without choros.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import jax

from choros.comm import ProcessSet, Reduction, global_process_set, joining
from choros.errors import ConfigError
from choros.jax.division import FILES, SlicedState, trained_of
from choros.jax.reduction import GradientReduction, slices_of_all
from choros.jax.sliced_state import SlicedUpdate
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.plan import ReduceConfig, indices_of_groups
from choros.parallel.reduce.reducer import GradientReducer

#: Those of the transformations of this process that are in use, for ``join``.
_reductions: weakref.WeakSet[GradientReduction] = weakref.WeakSet()


def distributed(
    tx: Any,
    *,
    op: Reduction = Reduction.AVERAGE,
    compression: Compressor = Compression.none,
    gradient_predivide_factor: float = 1.0,
    groups: int = 0,
    process_set: ProcessSet = global_process_set,
    name: str = "",
    shard_state: bool = False,
) -> Any:
    """Returns an optax transformation that reduces gradients over the ranks and then applies ``tx``.

    Clipping, weight decay and all other parts of ``tx`` receive the global gradient. ``update`` has one more argument::

        updates, state = tx.update(gradients, state, params, examples=len(batch))

    ``examples``, an integer that may be computed inside ``jax.jit``, weighs this rank's gradients of a mean loss; 0 is
    a batch that counts nowhere. Without it all weigh the same. In each hundredth step ranks compare their ``params``.

    Args:
        tx: an optax transformation, or ``optax.MultiSteps``.
        op: ``Average`` (over examples) or ``Sum``.
        compression: how gradients are sent: ``none``, ``fp16`` or one of the others in ``Compression``.
        gradient_predivide_factor: averages divide by this factor before the sum, and by the rest after it.
        groups: the number of messages in which gradients are sent; 0 for as few as possible.
        process_set: the ranks that share gradients; on other ranks ``tx`` is applied to their own.
        name: distinguishes transformations of the same parameters that are used at the same time.
        shard_state: whether each rank has a slice of the state only, and makes the updates in it: see docs/jax.md.

    Returns:
        An ``optax.GradientTransformationExtraArgs``, with the state of ``tx``, or an object that has it as ``inner``.

    Raises:
        ImportError: optax is not installed.
        ConfigError: an argument is invalid; from ``init``, if ``shard_state`` is not possible.
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
    reduction = GradientReduction(GradientReducer(config, name), shards_state=shard_state)
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


def _reducing(tx: Any, reduction: GradientReduction) -> Any:
    import optax

    if reduction.shards_state:
        sliced = SlicedUpdate(tx, reduction)
        return optax.GradientTransformationExtraArgs(sliced.init, sliced.update)

    def init(params: Any) -> Any:
        reduction.know(trained_of(params))
        return tx.init(params)

    def update(updates: Any, state: Any, params: Any = None, *, examples: Any = 1, **extra_args: Any) -> Any:
        if isinstance(state, SlicedState):
            raise ConfigError(f"expected was the state of one process, and given that of slices: shard_state. {FILES}")
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
        MismatchError: on all ranks, if another rank's collective needs all ranks, such as ``broadcast`` from this one,
            or an update with ``shard_state=True``.

    Example:
        >>> import choros.jax as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    jax.effects_barrier()
    active = [each for each in _reductions if each.layout and each.reducer.active]
    sets = (each.reducer.process_set for each in active)
    process_set = joining.process_set_of(sets, "transformations that distributed() has returned")
    parts: dict[Any, Any] = {}
    for each in active:
        if not each.shards_state:  # a rank without a batch has no state to make the update of its slices with
            parts |= each.reducer.participation(each.layout)
    with slices_of_all() if any(each.shards_state for each in active) else nullcontext():
        joining.join(process_set.communicator, parts)
    return process_set.ranks[joining.last_to_join(process_set.communicator)]
