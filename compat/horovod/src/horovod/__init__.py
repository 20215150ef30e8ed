"""Horovod's import names, on choros: ``import horovod.torch as hvd`` is ``import choros.torch as hvd``.

::

    horovod, horovod.runner                     choros.run; the command horovodrun
    horovod.torch                               choros.torch
    horovod.tensorflow                          choros.tensorflow
    horovod.keras, horovod.tensorflow.keras     choros.keras
    horovod.common                              process sets, errors, helpers
    horovod.spark, horovod.ray                  choros.spark, choros.ray
    horovod.mxnet, horovod.data                 an ImportError that says what to use instead
"""

import os
from typing import Any

__all__ = ["run"]

#: The version of Horovod whose names these are.
__version__ = "0.28.1"

# Horovod does not compare what ranks train: a script whose ranks differ goes on, with a warning.
os.environ.setdefault("CHOROS_DIVERGENCE", "warn")


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from horovod.runner import run  # the launcher, which ranks need not load

    return run
