"""Cases: the work that contenders are ordered to run, as frozen values whose texts label the tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.errors import ConfigError
from choros.wording import bytes_text

Shape = tuple[int, ...]

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_SIZE = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)
#: The factor from one size of a range to the next.
_STEP = 4


@dataclass(frozen=True)
class AllreduceCase:
    """An allreduce, with a sum, of ``bytes`` bytes: of one array, or a grouped one of a model's gradients."""

    bytes: int
    dtype: str
    model: str = ""
    shapes: tuple[Shape, ...] = ()

    @classmethod
    def grouped(cls, model: str, shapes: tuple[Shape, ...], dtype: str) -> AllreduceCase:
        """Returns the case of gradients of these shapes."""
        return cls(sum(map(math.prod, shapes)) * np.dtype(dtype).itemsize, dtype, model, shapes)

    @property
    def items(self) -> int:
        """The number of elements of one array of these bytes: at least one."""
        return max(1, self.bytes // np.dtype(self.dtype).itemsize)

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that it adds to its rows of the JSON file."""
        model = {"model": self.model, "arrays": len(self.shapes)} if self.shapes else {}
        return {"bytes": self.bytes, "dtype": self.dtype, **model}

    def __str__(self) -> str:
        size = bytes_text(self.bytes)
        return f"{self.model}: {len(self.shapes)} gradients, {size}" if self.shapes else size


#: The classes of a model's labels, and the number of different examples.
CLASSES, _DISTINCT = 10, 1024
#: Of each model, the shape of an example, and the default batch size of a rank.
EXAMPLES: dict[str, Shape] = {"cnn": (28, 28, 1), "mlp": (784,), "mlp-adam": (784,)}
BATCHES = {"cnn": 128, "mlp": 32, "mlp-adam": 32}


@dataclass(frozen=True)
class TrainCase:
    """Training steps of a model, with ``batch`` examples per rank and step."""

    model: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} a rank"


def batches(case: TrainCase, steps: int, batch: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns random images, from 0 to 1, and labels, which repeat after the first 1024, by step and in its batch."""
    generator = np.random.default_rng(0)
    shape = EXAMPLES[case.model]
    images = generator.random((_DISTINCT, *shape), np.float32)
    labels = generator.integers(0, CLASSES, _DISTINCT)
    return np.resize(images, (steps, batch, *shape)), np.resize(labels, (steps, batch))


#: The shapes of the CNN's gradients, in Keras' order.
CNN_SHAPES: tuple[Shape, ...] = (
    (3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,),
)  # fmt: skip


def unet_shapes(widths: Sequence[int]) -> tuple[Shape, ...]:
    """Returns the shapes of a U-Net's gradients in Keras' order; ``widths``: each level's filters, the finest first.
    With 16, 32 and 64 filters it is the model of ``examples/unet_horovod.py``.

        >>> unet_shapes([2])
        ((3, 3, 1, 2), (2,), (3, 3, 2, 2), (2,), (1, 1, 2, 1), (1,))
        >>> len(unet_shapes([16, 32, 64])), sum(map(math.prod, unet_shapes([16, 32, 64])))
        (26, 116753)
    """

    def convolved_twice(before: int, width: int) -> list[Shape]:
        return [(3, 3, before, width), (width,), (3, 3, width, width), (width,)]

    shapes: list[Shape] = []
    for before, width in pairwise([1, *widths]):
        shapes += convolved_twice(before, width)
    for coarse, fine in pairwise(reversed(widths)):
        shapes += [(2, 2, fine, coarse), (fine,), *convolved_twice(2 * fine, fine)]
    return (*shapes, (1, 1, widths[0], 1), (1,))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses sizes, with commas, and ranges, which grow by a factor of four, into bytes, or raises a ``ConfigError``.

    >>> parse_sizes("512, 4KiB")
    (512, 4096)
    >>> parse_sizes("1MiB..20MiB")
    (1048576, 4194304, 16777216, 20971520)
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size, end = _parse(first), _parse(last if dots else first)
        if size > end:
            raise ConfigError(f"--sizes {part.strip()}: the range is empty. Write the smaller size first.")
        while size < end:
            sizes.append(size)
            size *= _STEP
        sizes.append(end)
    return tuple(dict.fromkeys(sizes))


def parse_ranks(option: str, text: str) -> tuple[int, ...]:
    """Parses numbers of ranks, with commas, or raises a ``ConfigError``.

    >>> parse_ranks("--ranks", "2,4, 8")
    (2, 4, 8)
    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ConfigError(f"{option} {text}: expected positive whole numbers between commas, such as 2 or 1,2,4,8.")
    return tuple(dict.fromkeys(map(int, numbers)))


def _parse(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    units = {name.lower(): unit for name, unit in _UNITS.items()}
    unit = units.get(match[2].lower() or "b") if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ConfigError(
            f"--sizes: {text.strip()!r} is not a size. Write sizes like 4KiB,256KiB,16MiB, or a range like "
            "1MiB..256MiB; units are B, KiB, MiB and GiB."
        )
    return int(match[1]) * unit
