"""The collectives of ``choros.tensorflow``, and all else that it has."""

from choros.tensorflow import *

from horovod.common.basics import HorovodBasics

_basics = HorovodBasics(__file__)
