"""The callbacks of ``choros.keras``."""

from choros.keras.callbacks import *
