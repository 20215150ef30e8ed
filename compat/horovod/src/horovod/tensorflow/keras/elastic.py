"""The names of elastic training for Keras; see ``Elastic``."""

from horovod.keras.elastic import *
