"""Batch normalisation over all ranks."""

from choros.tensorflow import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
