"""The collectives of ``choros.tensorflow``, and all else that it has."""

from choros.tensorflow import *
