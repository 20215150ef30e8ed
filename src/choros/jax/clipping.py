"""Clipping by the norm of gradients of which each rank has slices."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from choros.comm import ProcessSet, Reduction
from choros.parallel.ops import allreduce

#: In an update of slices, the ranks that have the others, and a number of the compiled step.
_slices: ContextVar[tuple[ProcessSet, Any] | None] = ContextVar("slices", default=None)


@contextmanager
def of_slices(process_set: ProcessSet, number: Any) -> Iterator[None]:
    """A context in which gradients are this rank's slices. As a rank that has none would compute the norm while JAX
    traces the step, ``number`` makes the norm a part of the step.
    """
    before = _slices.set((process_set, number))
    try:
        yield
    finally:
        _slices.reset(before)


def clip_by_global_norm(max_norm: Any) -> Any:
    """Returns ``optax.clip_by_global_norm`` that also works in ``distributed(…, shard_state=True)``.

    There the norm is that of the gradients of all ranks' slices, a number summed in each step; elsewhere, optax's own.

    Args:
        max_norm: the largest norm of all gradients together: larger gradients are scaled to it.

    Returns:
        An ``optax.GradientTransformation`` without state.

    Raises:
        ImportError: optax is not installed.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd, optax
        >>> hvd.init()
        >>> tx = optax.chain(hvd.clip_by_global_norm(1.0), optax.sgd(1.0))
        >>> tx = hvd.distributed(tx, shard_state=True)
        >>> params = {"w": jnp.zeros(2)}
        >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params), params)
        >>> optax.apply_updates(params, updates)
        {'w': Array([-0.6, -0.8], dtype=float32)}
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("choros.jax.clip_by_global_norm needs optax: pip install optax.") from error
    plain = optax.clip_by_global_norm(max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        slices = _slices.get()
        if slices is None:
            return plain.update(updates, state, params)
        process_set, number = slices
        norm = jnp.sqrt(allreduce(_squares(updates, number), Reduction.SUM, process_set=process_set))

        def clipped(gradient: Any) -> Any:  # as optax computes it
            return jnp.where(norm < max_norm, gradient, (gradient / norm.astype(gradient.dtype)) * max_norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(plain.init, update)


def _squares(gradients: Any, number: Any) -> Any:
    """The sum of the squares of all items."""
    # A rank may have no item, so its dtypes do not tell what those of others are promoted to.
    total = jnp.zeros((), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32) + 0 * number
    for gradient in jax.tree.leaves(gradients):
        if jnp.issubdtype(gradient.dtype, jnp.inexact):
            total += jnp.sum(jnp.square(jnp.abs(gradient)), dtype=jnp.promote_types(jnp.float32, gradient.real.dtype))
    return total
