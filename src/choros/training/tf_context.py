"""TensorFlow's own current strategy: what ``tf.distribute`` answers while one of choros' strategies is entered.

TensorFlow's functions (``tf.nn.compute_average_loss``, ``tf.distribute.get_replica_context``) ask a stack that every
graph has. The strategy that is entered here is put on it; Keras' own code must see one replica instead, because choros,
not Keras, reduces gradients and splits batches::

    with strategy.scope():              tf.distribute.get_strategy() is strategy      in cross-replica context
        strategy.run(step)              tf.distribute.get_replica_context() is its replica's
            optimizer.apply(gradients)    TensorFlow's default strategy, after the reduction
        model.fit(…)                    TensorFlow's default strategy, of one replica
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def current_for_tensorflow(strategy: Any, replica: Any) -> Iterator[None]:
    """In this block ``strategy`` is TensorFlow's, cross-replica without ``replica``; nothing if it does not train."""
    if not _tensorflow_trains():
        yield
        return
    from tensorflow.python.distribute.distribute_lib import _ThreadMode

    with _on_stack(_ThreadMode(strategy, strategy if replica is None else None, replica)):
        yield


@contextmanager
def as_one_replica() -> Iterator[None]:
    """The block in which TensorFlow's current strategy is its default one, as outside of all strategies."""
    if not _tensorflow_trains() or not _stack():
        yield
        return
    from tensorflow.python.distribute.distribute_lib import _get_default_replica_mode

    with _on_stack(_get_default_replica_mode()):
        yield


def _tensorflow_trains() -> bool:
    if sys.modules.get("tensorflow") is None:
        return False
    keras = sys.modules.get("keras")
    return keras is None or bool(keras.backend.backend() == "tensorflow")


def _stack() -> list[Any]:
    import tensorflow as tf

    stack: list[Any] = tf.compat.v1.get_default_graph()._distribution_strategy_stack
    return stack


@contextmanager
def _on_stack(mode: Any) -> Iterator[None]:
    stack = _stack()
    stack.append(mode)
    try:
        yield
    finally:
        stack.pop()
