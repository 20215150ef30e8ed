"""``tf.distribute``'s communication options, which have no effect: the engine decides how values are sent.

They exist so that scripts that use them run unchanged. docs/engines.md describes the choices that choros offers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RunOptions",
]


class CommunicationImplementation(enum.Enum):
    """``tf.distribute.experimental.CommunicationImplementation``."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """``tf.distribute.experimental.CommunicationOptions``."""

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO


@dataclass(frozen=True)
class RunOptions:
    """``tf.distribute.RunOptions``."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


@dataclass(frozen=True)
class NcclAllReduce:
    """``tf.distribute.NcclAllReduce``."""

    num_packs: int = 1


@dataclass(frozen=True)
class HierarchicalCopyAllReduce:
    """``tf.distribute.HierarchicalCopyAllReduce``."""

    num_packs: int = 1


@dataclass(frozen=True)
class ReductionToOneDevice:
    """``tf.distribute.ReductionToOneDevice``."""

    reduce_to_device: str | None = None
    accumulation_fn: Any = None
