"""What contenders are told to run: frozen values, which also say what stands in the tables."""

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
    """A sum over all ranks of one array of so many ``bytes``."""

    bytes: int
    dtype: str

    @property
    def items(self) -> int:
        """How many numbers the array has: at least one."""
        return max(1, self.bytes // np.dtype(self.dtype).itemsize)

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows of the JSON file add."""
        return {"bytes": self.bytes, "dtype": self.dtype}

    def __str__(self) -> str:
        return format_bytes(self.bytes)


@dataclass(frozen=True)
class GroupedCase:
    """A sum over all ranks of a model's gradients, all at once.

    Attributes:
        name: the model's.
        shapes: the gradients'.
        dtype: the gradients'.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtype: str

    @property
    def joined(self) -> AllreduceCase:
        """The same bytes as one array."""
        items = sum(map(math.prod, self.shapes))
        return AllreduceCase(items * np.dtype(self.dtype).itemsize, self.dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows of the JSON file add."""
        return {**self.joined.facts, "model": self.name, "arrays": len(self.shapes)}

    def __str__(self) -> str:
        return f"{self.name}: {len(self.shapes)} gradients, {self.joined}"


@dataclass(frozen=True)
class Model:
    """What a model is trained on: the shape of an example, and how many a rank gets unless told."""

    example: Shape
    batch: int


MODELS = {"cnn": Model((28, 28, 1), 128), "mlp": Model((784,), 32)}


@dataclass(frozen=True)
class TrainCase:
    """Training steps of a model; ``batch`` examples on each rank and step."""

    model: str
    batch: int

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows of the JSON file add."""
        return {"model": self.model, "batch": self.batch}

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} a rank"


@dataclass(frozen=True)
class PartCase:
    """One part of what choros does in a step, by its name in ``PARTS``, with the CNN's gradients."""

    part: str

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows of the JSON file add."""
        return {"model": "cnn", "part": self.part}

    def __str__(self) -> str:
        return self.part


PARTS = ("control message", "pack", "allreduce", "unpack", "all, by the reducer")
#: The gradients of the CNN, as Keras lists them.
CNN_SHAPES: tuple[Shape, ...] = (
    (3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,),
)  # fmt: skip


def unet_shapes(widths: Sequence[int], channels: int = 1) -> tuple[Shape, ...]:
    """The gradients of a U-Net with two convolutions a level and transposed ones on the way up, as Keras lists them.

    With 16, 32 and 64 filters it is the model of ``examples/unet_horovod.py``.

    Args:
        widths: filters of the levels, the finest first.
        channels: of the images.

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
