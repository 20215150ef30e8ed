"""An allreduce of encoded numbers that sums in float32, as the network cannot sum them.

Of n bytes, alltoall and allgather each send (p − 1)/p · n: together those of a ring allreduce. Each rank knows the
rounding error of its own numbers, and the owner of a slice that of its sum::

                 rank 0            rank 1            rank 2
    encode    [a0│b0│c0]        [a1│b1│c1]        [a2│b2│c2]
    alltoall  a0  a1  a2        b0  b1  b2        c0  c1  c2       rank i receives slice i of every rank
    sum       A = Σ a           B = Σ b           C = Σ c          decoded, in float32, in rank order
    allgather [A│B│C]           [A│B│C]           [A│B│C]          encoded again, so rounded twice
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm import BFLOAT16, Communicator
from choros.comm.fusion import Layout
from choros.parallel.compression.compressor import DType, SelectiveCompressor, is_floating
from choros.parallel.compression.vector import Vector, VectorExchange, VectorSum
from choros.parallel.reduce.exchange import Exchange, Groups
from choros.topology import shard_range

Bytes = NDArray[np.uint8]
#: The number of elements that share a scale in int8: those below 1/254 of the largest are rounded to 0.
BLOCK = 256


@dataclass(frozen=True)
class Codec:
    """An encoding of float32 numbers in ``nbytes(count)`` bytes; numbers that are not finite stay so. ``name`` is its
    name in messages.
    """

    name: str
    nbytes: Callable[[int], int]
    encode: Callable[[Vector], Bytes]
    decode: Callable[[Bytes, int], Vector]


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
        received = communicator.alltoallv_bytes(encoded, self._nbytes, [nbytes] * communicator.size)
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


_BFLOAT16_CODEC = Codec(
    "bfloat16",
    nbytes=lambda count: 2 * count,
    encode=lambda numbers: numbers.astype(BFLOAT16).view(np.uint8),
    decode=lambda data, _: data.view(BFLOAT16).astype(np.float32),
)


@final
class Bfloat16(SelectiveCompressor):
    """Gradients are sent in bfloat16, the upper half of a float32, and summed in float32; float16 uncompressed. Unlike
    with float16, no value overflows or underflows; 8 bits of precision remain. Rounding is to nearest and thus
    unbiased, so there is no error feedback.
    """

    name = "bf16"

    def row_dtype(self, dtype: DType) -> DType:
        """Returns bfloat16 for wider floating-point dtypes."""
        return BFLOAT16 if is_floating(dtype) and dtype.itemsize > BFLOAT16.itemsize else dtype

    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See ``SelectiveCompressor``."""
        del shape
        return is_floating(dtype) and dtype != np.float16

    def compressing(self, communicator: Communicator, layout: Layout, groups: Groups) -> Exchange:
        """See ``SelectiveCompressor``."""
        method = partial(SlicedSum, communicator, codec=_BFLOAT16_CODEC)
        return VectorExchange(layout, groups, method, feedback=False)


def _encode_int8(numbers: Vector) -> Bytes:
    """The scales of all blocks, then one byte per element: ``value = byte * scale``, ``scale = max |value| / 127``."""
    blocks = np.zeros((_blocks(len(numbers)), BLOCK), np.float32)
    blocks.reshape(-1)[: len(numbers)] = numbers
    # A value that is not finite makes the scale not finite, and so reaches the other ranks.
    scales = np.abs(blocks).max(axis=1, initial=0) / np.float32(127)
    blocks /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
    codes = np.rint(blocks, out=blocks).astype(np.int8).reshape(-1)[: len(numbers)]
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])


def _decode_int8(data: Bytes, count: int) -> Vector:
    start = 4 * _blocks(count)
    scales = np.repeat(data[:start].view(np.float32), BLOCK)[:count]
    return scales * data[start:].view(np.int8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


_INT8_CODEC = Codec("int8", lambda count: 4 * _blocks(count) + count, _encode_int8, _decode_int8)


@final
class Int8(SelectiveCompressor):
    """Gradients are sent as int8, with a scale for each block of 256, and summed in float32, with error feedback.
    Blocks are those of Dettmers et al. 2022 (arXiv:2110.02861): a large element reduces its block's precision only.
    The two rounds with error feedback in each are those of 1-bit Adam (Tang et al. 2021, arXiv:2102.02888).
    """

    name = "int8"

    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See ``SelectiveCompressor``."""
        del shape
        return is_floating(dtype)

    def compressing(self, communicator: Communicator, layout: Layout, groups: Groups) -> Exchange:
        """See ``SelectiveCompressor``."""
        method = partial(SlicedSum, communicator, codec=_INT8_CODEC)
        return VectorExchange(layout, groups, method, feedback=True)
