"""Batch normalisation over the rows of all ranks, with Horovod's name."""

from __future__ import annotations

from typing import Any

import keras

from choros.comm import global_process_set, is_initialized
from choros.errors import ConfigError
from choros.parallel.moments import RankMoments
from choros.training.normalization import synchronize

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="choros")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A ``keras.layers.BatchNormalization`` that normalises by the mean and the variance of all ranks' rows.

    In training, on all frameworks: in ``fit``, and in loops of your own, in which all ranks must call it. Ranks may
    have different numbers of rows. Each call sends one small message forward and one backward.

    Args:
        fused: Horovod's; only ``False``.
        **kwargs: those of ``keras.layers.BatchNormalization``.

    Raises:
        ConfigError: ``fused`` is not ``False``.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization(momentum=0.9)])
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ConfigError(f"SyncBatchNormalization(fused={fused}): only False is possible, as in Horovod.")
        # Keras accepts the argument only on TensorFlow.
        super().__init__(**{**kwargs, "synchronized": False})
        self.synchronized = True
        synchronize(self, _of_the_job)


def _of_the_job() -> Any:
    """What combines the moments of all ranks, whose gradients have the same weight."""
    several = is_initialized() and global_process_set.communicator.size > 1
    return RankMoments().combine if several else None
