"""The collectives of ``choros.torch``, and all else that it has."""

from choros.torch import *

from horovod.common.basics import HorovodBasics

_basics = HorovodBasics(__file__)
