"""What a script ends with."""

from __future__ import annotations

import keras
import numpy as np

from others.roads import BACKEND
from training.matrix_cases import Trained

__all__ = ["JIT", "Trained", "weights_of"]

#: XLA compiles small models for longer than they train.
JIT = False if BACKEND == "tensorflow" else "auto"


def weights_of(*models: keras.Model) -> list[np.ndarray]:
    """Returns the values of all weights."""
    return [np.array(keras.ops.convert_to_numpy(weight.value)) for model in models for weight in model.weights]
