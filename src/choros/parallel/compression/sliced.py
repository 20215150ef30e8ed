"""An allreduce of encoded numbers that sums in float32.

Encoded numbers cannot be added up on their way, so each rank sums one slice of everybody's. Three ranks::

                rank 0            rank 1            rank 2
    encode   [a0│b0│c0]        [a1│b1│c1]        [a2│b2│c2]
    deal     a0  a1  a2        b0  b1  b2        c0  c1  c2       rank i gets slice i of every rank
    sum      A = Σ a           B = Σ b           C = Σ c          decoded, in float32, in the ranks' order
    gather   [A│B│C]           [A│B│C]           [A│B│C]          encoded again, so rounded once more

Of n encoded bytes, each step brings (p − 1)/p · n to the network: together the bytes of a ring allreduce.
What is lost is known to who rounds: to each rank of its own numbers, and to the owner of a slice of its sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm import Communicator
from choros.parallel.compression.vector import Vector, VectorSum
from choros.topology import shard_range

__all__ = ["Codec", "SlicedSum"]

Bytes = NDArray[np.uint8]


class Codec(ABC):
    """Numbers as fewer bytes.

    Attributes:
        name: what it is called in messages.
    """

    name: str

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """How many bytes ``count`` numbers take."""

    @abstractmethod
    def encode(self, numbers: Vector) -> Bytes:
        """``nbytes(len(numbers))`` bytes. What is not finite stays so."""

    @abstractmethod
    def decode(self, data: Bytes, count: int) -> Vector:
        """``count`` numbers, as near as can be to those that were encoded."""


@final
class SlicedSum(VectorSum):
    """Deals out encoded slices, sums them in float32 and gathers the encoded sums; see the module."""

    def __init__(self, communicator: Communicator, count: int, codec: Codec) -> None:
        self._communicator = communicator
        self._codec = codec
        self._slices = [slice(*shard_range(count, rank, communicator.size)) for rank in range(communicator.size)]
        self._counts = [part.stop - part.start for part in self._slices]
        self._nbytes = [codec.nbytes(count) for count in self._counts]
        self.description = f"{codec.name}[{count}]"

    def sum(self, vector: Vector, lost: Vector | None) -> Vector:
        """See ``VectorSum``."""
        codec, communicator = self._codec, self._communicator
        count, nbytes = self._counts[communicator.rank], self._nbytes[communicator.rank]

        encoded = np.concatenate([codec.encode(vector[part]) for part in self._slices])
        dealt = communicator.deal_bytes(encoded, self._nbytes, [nbytes] * communicator.size)
        summed = np.zeros(count, np.float32)
        for part in np.split(dealt, communicator.size):
            summed += codec.decode(part, count)
        total = self._decode(communicator.gather_bytes(codec.encode(summed), self._nbytes))

        if lost is not None:
            np.subtract(vector, self._decode(encoded), out=lost)
            own = self._slices[communicator.rank]
            lost[own] += summed - total[own]
        return total

    def _decode(self, encoded: Bytes) -> Vector:
        parts = np.split(encoded, np.cumsum(self._nbytes)[:-1])
        return np.concatenate([self._codec.decode(*pair) for pair in zip(parts, self._counts, strict=True)])
