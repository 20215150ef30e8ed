"""Batch normalisation over all ranks."""

from choros.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
