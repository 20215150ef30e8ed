"""Random numbers of PyTorch and TensorFlow themselves, which differ between replicas while a training step runs.

Keras' dropout without a seed draws PyTorch's, as ``torch.nn.Dropout`` does. Between steps processes that were seeded
the same have the same stream: data sets are shuffled with it. A step takes one number from it::

    process 0    ── shuffle ──┬─────────────── n ───────────────┬── shuffle ──
                              └─► manual_seed(n), dropout, …    │
    process 1    ── shuffle ──┬─────────────── n ───────────────┬── shuffle ──
                              └─► manual_seed(n + spacing), …   │

``tf.random.uniform``, ``tf.nn.dropout`` and the like depend on the operation and the global seed, which all
processes of a strategy have in common. While a step runs, or is compiled, a replica has another one::

    process 0    ── shuffle: s ──┬── step: s ──────────────┬── shuffle: s ──
    process 1    ── shuffle: s ──┴── step: s + spacing ────┴── shuffle: s ──

A ``tf.random.Generator``, too, has the same state in all processes and another key in the step. (TensorFlow itself
changes the key in ``strategy.run``, but not in ``fit``.)
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: The difference of two replicas' seeds: odd, so that no two replicas have the same seed, and large, because seeds that
#: are close may be used for successive numbers.
SPACING = 747796405


@contextmanager
def torch_numbers_of(replica: int) -> Iterator[None]:
    """The block in which PyTorch's default generators draw the numbers of a replica."""
    import torch

    seed = int(torch.randint(2**31, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed((seed + replica * SPACING) % 2**31)
        yield


def torch_streams() -> dict[str, Any]:
    """The states of PyTorch's default generators, of the CPU and of the GPUs in use, as NumPy arrays."""
    import torch

    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state().numpy().copy(), "cuda": [each.cpu().numpy().copy() for each in on_gpu]}


def set_torch_streams(streams: dict[str, Any]) -> None:
    """Continues the streams of ``torch_streams``; those of GPUs that this process does not have are left out."""
    import torch

    torch.set_rng_state(torch.from_numpy(streams["cpu"]))
    if streams["cuda"] and torch.cuda.is_available():
        for index, state in enumerate(streams["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.from_numpy(state), index)


@contextmanager
def tensorflow_numbers_of(replica: int) -> Iterator[None]:
    """The block in which TensorFlow draws the numbers of a replica."""
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
    """The global seed, its sequence and the generator's state; states in TensorFlow's kernels cannot be read."""
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
