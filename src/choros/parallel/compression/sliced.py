"""An allreduce of encoded numbers that sums in float32, as the network cannot sum them.

Of n bytes, alltoall and allgather each send (p − 1)/p · n: together those of a ring allreduce. Each rank knows the
rounding error of its own numbers, and the owner of a slice that of its sum::

                 rank 0            rank 1            rank 2
    encode    [a0│b0│c0]        [a1│b1│c1]        [a2│b2│c2]
    alltoall  a0  a1  a2        b0  b1  b2        c0  c1  c2       rank i receives slice i of every rank
    sum       A = Σ a           B = Σ b           C = Σ c          decoded, in float32, in rank order
    allgather [A│B│C]           [A│B│C]           [A│B│C]          encoded again, so rounded twice
"""

from abc import abstractmethod
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm import BFLOAT16, Communicator, DType
from choros.parallel.compression.compressor import Vector, VectorCompressor, is_floating
from choros.topology import shard_range

Bytes = NDArray[np.uint8]
#: The number of elements that share a scale in int8: those below 1/254 of the largest are rounded to 0.
BLOCK = 256


class _SlicedCompressor(VectorCompressor):
    """Encodes float32 numbers in ``nbytes(count)`` bytes; numbers that are not finite stay so."""

    @abstractmethod
    def nbytes(self, count: int) -> int: ...

    @abstractmethod
    def encode(self, numbers: Vector) -> Bytes: ...

    @abstractmethod
    def decode(self, data: Bytes, count: int) -> Vector: ...

    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        del shape
        return is_floating(dtype)

    @final
    def sum(self, communicator: Communicator, vector: Vector, residual: Vector | None) -> Vector:
        """Scatters encoded slices, sums them in float32 and gathers the encoded sums; see the module."""
        rank, size = communicator.rank, communicator.size
        slices = [slice(*shard_range(len(vector), each, size)) for each in range(size)]
        counts = [part.stop - part.start for part in slices]
        nbytes = list(map(self.nbytes, counts))

        def decoded(data: Bytes) -> Vector:
            parts = zip(np.split(data, np.cumsum(nbytes)[:-1]), counts, strict=True)
            return np.concatenate([self.decode(part, count) for part, count in parts])

        encoded = np.concatenate([self.encode(vector[part]) for part in slices])
        received = communicator.alltoallv_bytes(encoded, nbytes, [nbytes[rank]] * size)
        summed = np.zeros(counts[rank], np.float32)
        for part in np.split(received, size):
            summed += self.decode(part, counts[rank])
        total = decoded(communicator.gather_bytes(self.encode(summed), nbytes))

        if residual is not None:
            np.subtract(vector, decoded(encoded), out=residual)
            residual[slices[rank]] += summed - total[slices[rank]]
        return total


@final
class Bfloat16(_SlicedCompressor):
    """Gradients are sent in bfloat16, the upper half of a float32, and summed in float32; float16 uncompressed. Unlike
    with float16, no value overflows or underflows; 8 bits of precision remain. Rounding is to nearest and thus
    unbiased, so there is no error feedback.
    """

    name = "bf16"
    feedback = False

    def row_dtype(self, dtype: DType) -> DType:
        """Returns bfloat16 for wider floating-point dtypes."""
        return BFLOAT16 if is_floating(dtype) and dtype.itemsize > BFLOAT16.itemsize else dtype

    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """All but float16."""
        return super().compresses(shape, dtype) and dtype != np.float16

    def nbytes(self, count: int) -> int:
        """Two for each number."""
        return 2 * count

    def encode(self, numbers: Vector) -> Bytes:
        """Rounds to nearest."""
        return numbers.astype(BFLOAT16).view(np.uint8)

    def decode(self, data: Bytes, count: int) -> Vector:
        """Exactly."""
        del count
        return data.view(BFLOAT16).astype(np.float32)


@final
class Int8(_SlicedCompressor):
    """Gradients are sent as int8, with a scale for each block of 256, and summed in float32, with error feedback.
    Blocks are those of Dettmers et al. 2022 (arXiv:2110.02861): a large element reduces its block's precision only.
    The two rounds with error feedback in each are those of 1-bit Adam (Tang et al. 2021, arXiv:2102.02888).
    """

    name = "int8"

    def nbytes(self, count: int) -> int:
        """The scales of all blocks, then one byte for each number."""
        return 4 * _blocks(count) + count

    def encode(self, numbers: Vector) -> Bytes:
        """``value = byte * scale``, ``scale = max |value| / 127``."""
        blocks = np.zeros((_blocks(len(numbers)), BLOCK), np.float32)
        blocks.reshape(-1)[: len(numbers)] = numbers
        # A value that is not finite makes the scale not finite, and so reaches the other ranks.
        scales = np.abs(blocks).max(axis=1, initial=0) / np.float32(127)
        blocks /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
        codes = np.rint(blocks, out=blocks).astype(np.int8).reshape(-1)[: len(numbers)]
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])

    def decode(self, data: Bytes, count: int) -> Vector:
        """Each byte times the scale of its block."""
        start = 4 * _blocks(count)
        scales = np.repeat(data[:start].view(np.float32), BLOCK)[:count]
        return scales * data[start:].view(np.int8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)
