"""Elastic training for Keras."""

from choros.keras.elastic import *
