"""Loss scaling for custom training loops: the sum over the replicas is the mean over the global batch.

The names are those of ``tf.nn``.

::

    def step(x, y):
        loss = choros.nn.compute_average_loss(per_example_loss(x, y))       sum over own rows ÷ rows of all replicas
        loss += choros.nn.scale_regularization_loss(sum(model.losses))      ÷ number of replicas, each of which adds it
        …                                                                   apply_gradients sums over the replicas
    strategy.run(step, args=batch)
"""

from typing import Any

import numpy as np

from choros.arrays import ArrayAdapter, adapter_of
from choros.comm import DType
from choros.distribute.strategies import get_replica_context
from choros.errors import ConfigError, StrategyError

__all__ = ["compute_average_loss", "scale_regularization_loss"]


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
    """Returns the sum of the losses of this replica's examples, divided by the global batch size.

    ``tf.nn.compute_average_loss`` assumes that all replicas' batches have the same size. This function is also correct
    for uneven batches when no ``global_batch_size`` is given.

    Args:
        per_example_loss: an array of TensorFlow, torch, JAX or NumPy, with one loss for each example, or several, which
            are summed.
        sample_weight: factors of the losses; one for each example, or an array of a compatible shape. Weights do not
            change the divisor.
        global_batch_size: the number of examples of all replicas, an integer; ``None``: the replicas sum theirs in one
            small allreduce. For a batch of 0 examples the loss is 0.

    Returns:
        A scalar of the same framework and dtype, differentiable. It is computed in float32 or wider.

    Raises:
        ConfigError: the loss is a scalar, or ``global_batch_size`` is not an integer of 0 or more.
        StrategyError: it was called in a strategy's scope, but outside of its replicas.

    Example:
        >>> import numpy as np
        >>> float(compute_average_loss(np.array([1.0, 2.0, 3.0]), sample_weight=[1.0, 0.0, 1.0]))
        1.3333333333333333
    """
    adapter = adapter_of(per_example_loss)
    spec = adapter.spec(per_example_loss)
    if not spec.shape:
        raise ConfigError(
            "compute_average_loss needs a loss for each example, not a scalar: compute it with reduction=None."
        )
    working = np.promote_types(spec.dtype, np.float32)
    if global_batch_size is None:
        rows = adapter.extent(per_example_loss, 0)
        size = _replica_context("compute_average_loss").all_reduce("SUM", rows)
    else:
        size = _batch_size(global_batch_size)
    losses = adapter.cast(per_example_loss, working)
    if sample_weight is not None:
        losses = losses * _match_rank(
            _converted(adapter, sample_weight, per_example_loss, working), adapter, len(spec.shape)
        )
    count = _converted(adapter, size, per_example_loss, working)
    is_empty = adapter.cast(count == 0, working)
    return adapter.cast(adapter.sum(losses) * (1 - is_empty) / (count + is_empty), spec.dtype)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Returns the sum of ``regularization_loss`` divided by the number of replicas, each of which adds it to its loss.

    Args:
        regularization_loss: an array of TensorFlow, torch, JAX or NumPy, or a number.

    Returns:
        A scalar of the same framework and dtype.

    Raises:
        StrategyError: it was called in a strategy's scope, but outside of its replicas.

    Example:
        >>> scale_regularization_loss(0.5)
        0.5
    """
    replicas = _replica_context("scale_regularization_loss").num_replicas_in_sync
    if isinstance(regularization_loss, (int, float)):
        return regularization_loss / replicas
    adapter = adapter_of(regularization_loss)
    return adapter.sum(regularization_loss) / replicas


def _replica_context(what: str) -> Any:
    context = get_replica_context()
    if context is None:
        raise StrategyError(
            f"{what} was called in a strategy's scope, but outside of its replicas: call it in the function that "
            "strategy.run runs. In fit, losses are averaged over the global batch automatically."
        )
    return context


def _batch_size(given: Any) -> Any:
    spec = adapter_of(given).spec(given)
    if spec.shape or spec.dtype.kind not in "iu":
        raise ConfigError(f"global_batch_size={given!r}: expected an integer, the number of examples of all replicas.")
    if isinstance(given, (int, np.integer)) and given < 0:
        raise ConfigError(f"global_batch_size={given}: there cannot be fewer than 0 examples.")
    return given


def _converted(adapter: ArrayAdapter, value: Any, like: Any, dtype: DType) -> Any:
    """Returns ``value`` as an array of ``like``'s framework."""
    own = value if adapter_of(value) is adapter else adapter.from_host(np.asarray(value), like)
    return adapter.cast(own, dtype)


def _match_rank(weights: Any, adapter: ArrayAdapter, rank: int) -> Any:
    """Adds a last dimension to ``weights`` or removes it, as ``tf.nn`` does for losses of ``rank`` dimensions."""
    shape = adapter.spec(weights).shape
    if len(shape) == rank + 1 and shape[-1] == 1:
        return weights[..., 0]
    return weights[..., None] if 0 < len(shape) == rank - 1 else weights
