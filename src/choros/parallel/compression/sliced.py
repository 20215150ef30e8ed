"""An allreduce of encoded numbers that sums in float32.

Encoded numbers cannot be summed by the network, so each rank sums one slice of all ranks' numbers. Three ranks::

                 rank 0            rank 1            rank 2
    encode    [a0│b0│c0]        [a1│b1│c1]        [a2│b2│c2]
    alltoall  a0  a1  a2        b0  b1  b2        c0  c1  c2       rank i receives slice i of every rank
    sum       A = Σ a           B = Σ b           C = Σ c          decoded, in float32, in rank order
    allgather [A│B│C]           [A│B│C]           [A│B│C]          encoded again, so rounded twice

Of n encoded bytes, alltoall and allgather each send (p − 1)/p · n: together the bytes of a ring allreduce. Each rank
knows the rounding error of its own numbers, and the owner of a slice that of its sum.
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
    """An encoding of float32 numbers in fewer bytes.

    Attributes:
        name: its name in messages.
    """

    name: str

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Returns the number of bytes of ``count`` encoded numbers."""

    @abstractmethod
    def encode(self, numbers: Vector) -> Bytes:
        """Returns ``nbytes(len(numbers))`` bytes. Numbers that are not finite stay so."""

    @abstractmethod
    def decode(self, data: Bytes, count: int) -> Vector:
        """Returns ``count`` numbers, the best approximation of those that were encoded."""


@final
class SlicedSum(VectorSum):
    """Scatters encoded slices, sums them in float32 and gathers the encoded sums; see the module."""

    def __init__(self, communicator: Communicator, count: int, codec: Codec) -> None:
        self._communicator = communicator
        self._codec = codec
        self._slices = [slice(*shard_range(count, rank, communicator.size)) for rank in range(communicator.size)]
        self._counts = [part.stop - part.start for part in self._slices]
        self._nbytes = [codec.nbytes(count) for count in self._counts]
        self.description = f"{codec.name}[{count}]"

    def sum(self, vector: Vector, residual: Vector | None) -> Vector:
        """See ``VectorSum``."""
        codec, communicator = self._codec, self._communicator
        count, nbytes = self._counts[communicator.rank], self._nbytes[communicator.rank]

        encoded = np.concatenate([codec.encode(vector[part]) for part in self._slices])
        received = communicator.deal_bytes(encoded, self._nbytes, [nbytes] * communicator.size)
        summed = np.zeros(count, np.float32)
        for part in np.split(received, communicator.size):
            summed += codec.decode(part, count)
        total = self._decode(communicator.gather_bytes(codec.encode(summed), self._nbytes))

        if residual is not None:
            np.subtract(vector, self._decode(encoded), out=residual)
            own = self._slices[communicator.rank]
            residual[own] += summed - total[own]
        return total

    def _decode(self, encoded: Bytes) -> Vector:
        parts = np.split(encoded, np.cumsum(self._nbytes)[:-1])
        return np.concatenate([self._codec.decode(*pair) for pair in zip(parts, self._counts, strict=True)])
