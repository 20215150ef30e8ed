"""Where the code that calls a function of this package runs: in TensorFlow 1's graphs, in AutoGraph's functions."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

P = ParamSpec("P")
T = TypeVar("T")


def in_session_graph() -> bool:
    """Whether operations are added to a graph of TensorFlow 1, which a session runs: those that are asked for alone."""
    return not (tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function)


def unconverted(function: Callable[P, T]) -> Callable[P, T]:
    """Keeps AutoGraph from converting ``function``, and what it calls, where it is called in a ``tf.function``."""
    public: Callable[P, T] = functools.wraps(function)(tf.autograph.experimental.do_not_convert(function))
    return public
