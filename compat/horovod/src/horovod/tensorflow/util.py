"""The helper that Horovod's modules, and tests, share."""

import tensorflow as tf

__all__ = ["_executing_eagerly"]

_executing_eagerly = tf.executing_eagerly
