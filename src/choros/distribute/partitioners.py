"""Partitioners, which shard variables over parameter servers (``tf.distribute.experimental.partitioners``).

A partitioner is a callable ``(shape, dtype) -> [shards, 1, 1, …]``: the number of shards of a variable along its first
axis, and 1 for each other axis. These have TensorFlow's names and arithmetic.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from choros.errors import ConfigError

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(ABC):
    """Decides the number of shards of a variable along one axis."""

    @final
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis.

        Args:
            shape: the variable's shape; at least one dimension.
            dtype: the variable's dtype: any of NumPy's, or ``"bfloat16"``.
            axis: the axis that is sharded.

        Raises:
            ConfigError: the variable has no such axis.
        """
        if axis >= len(shape):
            raise ConfigError(
                f"a variable of shape {tuple(shape)} cannot be sharded along axis {axis}: it has no such axis."
            )
        shards, itemsize = [1] * len(shape), np.dtype(getattr(dtype, "name", dtype)).itemsize
        shards[axis] = max(1, min(shape[axis], self._shards(tuple(shape), itemsize, axis)))
        return shards

    @abstractmethod
    def _shards(self, shape: tuple[int, ...], itemsize: int, axis: int) -> int:
        """Returns the desired number of shards; the caller limits it to the axis' length."""


@final
class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable.

    Args:
        num_shards: the number; fewer where the first axis is shorter.

    Example:
        >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
        [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def _shards(self, shape: tuple[int, ...], itemsize: int, axis: int) -> int:
        return self._num_shards


@final
class MinSizePartitioner(Partitioner):
    """The largest number of shards of at least a minimum size.

    Args:
        min_shard_bytes: the minimum size of a shard.
        max_shards: the maximum number of shards.
        bytes_per_string: has no effect: Keras 3 has no variables of strings.

    Example:
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
        [2, 1]
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=10)((6, 1), "float32")
        [6, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def _shards(self, shape: tuple[int, ...], itemsize: int, axis: int) -> int:
        return min(self._max_shards, math.ceil(math.prod(shape) * itemsize / self._min_shard_bytes))


@final
class MaxSizePartitioner(Partitioner):
    """The smallest number of shards of at most a maximum size.

    Args:
        max_shard_bytes: the maximum size of a shard; one row of the first axis may exceed it.
        max_shards: the maximum number of shards, even if they then exceed the size; ``None`` is no limit.
        bytes_per_string: has no effect: Keras 3 has no variables of strings.

    Example:
        >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
        [6, 1]
        >>> MaxSizePartitioner(max_shard_bytes=1024)((6, 1), "float32")
        [1, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def _shards(self, shape: tuple[int, ...], itemsize: int, axis: int) -> int:
        row_bytes = math.prod(shape[:axis] + shape[axis + 1 :]) * itemsize
        rows = max(1, self._max_shard_bytes // max(1, row_bytes))
        shards = math.ceil(shape[axis] / rows)
        return shards if self._max_shards is None else min(shards, self._max_shards)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name}={value!r}: expected a number of at least 1.")
    return value
