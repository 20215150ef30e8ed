"""TensorFlow's random numbers in replicas: those of its functions, and those of generators.

``tf.random.uniform``, ``tf.nn.dropout`` and the like depend on the global seed, which all processes of a strategy have
in common, and on the operation. While a step runs, or is compiled, a replica has another global seed::

    process 0    ── shuffle: s ──┬── step: s ──────────────┬── shuffle: s ──
    process 1    ── shuffle: s ──┴── step: s + spacing ────┴── shuffle: s ──

A ``tf.random.Generator`` has the same state in all processes; in the step its key is another one, likewise. (TensorFlow
itself changes the key in ``strategy.run``, but not in ``fit``.)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from choros.parallel.torch_random import SPACING

__all__ = ["set_tensorflow_streams", "tensorflow_numbers_of", "tensorflow_streams"]


@contextmanager
def tensorflow_numbers_of(replica: int) -> Iterator[None]:
    """The block in which TensorFlow draws the numbers of a replica.

    Args:
        replica: its index.
    """
    if sys.modules.get("tensorflow") is None or replica == 0:
        yield
        return
    import tensorflow as tf
    from tensorflow.python.eager import context

    def skip(generator: Any, delta: Any) -> Any:
        state = own_skip(generator, delta)  # counters, then the key
        return tf.concat([state[:-1], state[-1:] + replica * SPACING], 0)

    # A function that is being compiled has taken over the global seed.
    holder: Any = context.context() if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    name = "_seed" if tf.executing_eagerly() else "seed"
    seed, own_skip = getattr(holder, name), tf.random.Generator.skip
    tf.random.Generator.skip = skip
    if seed is not None:
        setattr(holder, name, (seed + replica * SPACING) % 2**31)
    try:
        yield
    finally:
        setattr(holder, name, seed)
        tf.random.Generator.skip = own_skip


def tensorflow_streams() -> dict[str, Any]:
    """The global seed, what draws the seeds of operations, and the state of the global generator, if there is one.

    The states inside of operations that have been called already, such as a ``tf.random.uniform`` of a compiled
    function, cannot be read: TensorFlow keeps them in its kernels.
    """
    from tensorflow.python.eager import context
    from tensorflow.python.ops import stateful_random_ops

    holder: Any = context.context()
    drawer, generator = getattr(holder, "_rng", None), stateful_random_ops.global_generator
    return {
        "seed": holder._seed,
        "operations": None if drawer is None else drawer.getstate(),
        "generator": None if generator is None else generator.state.numpy(),
    }


def set_tensorflow_streams(streams: dict[str, Any]) -> None:
    """Continues the streams of ``tensorflow_streams``."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    holder: Any = context.context()
    holder._seed = streams["seed"]
    if streams["operations"] is not None:
        if getattr(holder, "_rng", None) is None:
            holder._rng = random.Random()  # noqa: S311
        holder._rng.setstate(streams["operations"])
    if streams["generator"] is not None:
        tf.random.get_global_generator().state.assign(streams["generator"])
