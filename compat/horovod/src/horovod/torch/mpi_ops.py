"""The collectives of ``choros.torch``, and all else that it has."""

from choros.torch import *
