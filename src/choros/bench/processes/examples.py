"""Training data: random images and labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from choros.bench.cases import MODELS, TrainCase

__all__ = ["CLASSES", "examples"]

CLASSES = 10
_DISTINCT = 1024


def examples(case: TrainCase, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns ``count`` images with values from 0 to 1, and their labels, which repeat after the first 1024.

    Returns:
        Arrays of shape ``(count, *example)`` and ``(count,)``.
    """
    generator = np.random.default_rng(0)
    shape = MODELS[case.model].example
    images = generator.random((_DISTINCT, *shape), np.float32)
    return np.resize(images, (count, *shape)), np.resize(generator.integers(0, CLASSES, _DISTINCT), count)
