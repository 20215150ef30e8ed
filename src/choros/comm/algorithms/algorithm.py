"""The interface of an allreduce algorithm, and its tuning parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from choros.comm.fusion import CHUNK_BYTES
from choros.comm.reduction import Reduction

__all__ = ["AllreduceAlgorithm", "Tuning"]


@dataclass(frozen=True)
class Tuning:
    """Sizes that affect the speed of an allreduce, never its result; the same on every rank.

    Attributes:
        chunk_bytes: arrays are packed, reduced and unpacked in chunks of this many bytes.
        window_bytes: messages from this size on are reduced in shared memory, smaller ones by MPI.
        block_bytes: a rank sums this many bytes, and copies them to the other ranks while they are in its cache.
    """

    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = 16 << 10
    block_bytes: int = 1 << 20

    def __str__(self) -> str:
        by = f"in shared memory from {self.window_bytes >> 10} KiB on" if self.window_bytes < 1 << 40 else "by messages"
        return f"{by}, in chunks of {self.chunk_bytes >> 10} KiB, {self.block_bytes >> 10} KiB at once"


class AllreduceAlgorithm(ABC):
    """One way to reduce a flat buffer over all ranks; called by all of them."""

    @abstractmethod
    def allreduce(self, buffer: NDArray[Any], op: Reduction) -> None:
        """Reduces ``buffer`` in place with SUM, MIN, MAX or PRODUCT."""
