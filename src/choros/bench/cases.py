"""Cases: the work that contenders are ordered to run, as frozen values whose texts label the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from choros.bench.sizes import format_bytes

__all__ = [
    "CNN_SHAPES", "MODELS", "PARTS", "AllreduceCase", "GroupedCase", "Model", "PartCase", "Shape", "TrainCase",
    "unet_shapes",
]  # fmt: skip

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AllreduceCase:
    """An allreduce, with a sum, of one array of ``bytes`` bytes."""

    bytes: int
    dtype: str

    @property
    def items(self) -> int:
        """The number of elements of the array: at least one."""
        return max(1, self.bytes // np.dtype(self.dtype).itemsize)

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that it adds to its rows of the JSON file."""
        return {"bytes": self.bytes, "dtype": self.dtype}

    def __str__(self) -> str:
        return format_bytes(self.bytes)


@dataclass(frozen=True)
class GroupedCase:
    """A grouped allreduce, with a sum, of a model's gradients.

    Attributes:
        name: the model's name.
        shapes: the gradients' shapes.
        dtype: the gradients' data type.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtype: str

    @property
    def joined(self) -> AllreduceCase:
        """The case with the same number of bytes in one array."""
        items = sum(map(math.prod, self.shapes))
        return AllreduceCase(items * np.dtype(self.dtype).itemsize, self.dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that it adds to its rows of the JSON file."""
        return {**self.joined.facts, "model": self.name, "arrays": len(self.shapes)}

    def __str__(self) -> str:
        return f"{self.name}: {len(self.shapes)} gradients, {self.joined}"


@dataclass(frozen=True)
class Model:
    """The training data of a model: the shape of an example, and the default batch size of a rank."""

    example: Shape
    batch: int


MODELS = {"cnn": Model((28, 28, 1), 128), "mlp": Model((784,), 32)}


@dataclass(frozen=True)
class TrainCase:
    """Training steps of a model, with ``batch`` examples per rank and step."""

    model: str
    batch: int

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that it adds to its rows of the JSON file."""
        return {"model": self.model, "batch": self.batch}

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} a rank"


@dataclass(frozen=True)
class PartCase:
    """One part of the communication of a step of choros, a name in ``PARTS``, with the CNN's gradients."""

    part: str

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that it adds to its rows of the JSON file."""
        return {"model": "cnn", "part": self.part}

    def __str__(self) -> str:
        return self.part


PARTS = ("control message", "pack", "allreduce", "unpack", "all, by the reducer")
#: The shapes of the CNN's gradients, in Keras' order.
CNN_SHAPES: tuple[Shape, ...] = (
    (3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,),
)  # fmt: skip


def unet_shapes(widths: Sequence[int], channels: int = 1) -> tuple[Shape, ...]:
    """Returns the shapes of a U-Net's gradients, in Keras' order: two convolutions per level, transposed ones upwards.

    With 16, 32 and 64 filters it is the model of ``examples/unet_horovod.py``.

    Args:
        widths: the numbers of filters of the levels, the finest first.
        channels: the number of channels of the images.

    Example:
        >>> unet_shapes([2])
        ((3, 3, 1, 2), (2,), (3, 3, 2, 2), (2,), (1, 1, 2, 1), (1,))
        >>> len(unet_shapes([16, 32, 64])), sum(map(math.prod, unet_shapes([16, 32, 64])))
        (26, 116753)
    """

    def convolved_twice(before: int, width: int) -> list[Shape]:
        return [(3, 3, before, width), (width,), (3, 3, width, width), (width,)]

    shapes: list[Shape] = []
    for before, width in pairwise([channels, *widths]):
        shapes += convolved_twice(before, width)
    for coarse, fine in pairwise(reversed(widths)):
        shapes += [(2, 2, fine, coarse), (fine,), *convolved_twice(2 * fine, fine)]
    return (*shapes, (1, 1, widths[0], 1), (1,))
