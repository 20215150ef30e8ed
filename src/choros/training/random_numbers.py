"""Random numbers of layers, which differ between replicas, while the state that generates them is the same on all.

::

    SeedGenerator.state          [seed, 7]      the same on all replicas: checkpoints have it, and so has one process
      next()      replica 0      [seed, 7]      as in plain Keras
                  replica 1      [seed + spacing, 7]
                  replica 2      [seed + 2 · spacing, 7]

So dropout drops other units on each replica, reproducibly: the numbers depend on the seed and the replica's index.
Random functions of PyTorch and TensorFlow themselves are varied by ``parallel/random_streams.py``.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from choros.comm import global_process_set, has_others
from choros.parallel.random_streams import (
    SPACING,
    set_tensorflow_streams,
    set_torch_streams,
    tensorflow_numbers_of,
    tensorflow_streams,
    torch_numbers_of,
    torch_streams,
)
from choros.training.keras_internals.models import derive, global_seed_generator, seed_generators_of
from choros.training.trainer import spans_ranks

_ATTRIBUTE = "_choros_replica"


class _ReplicaDrawsMixin:
    """The method with which a ``SeedGenerator`` draws a seed of the replica."""

    def next(self, ordered: bool = True) -> Any:
        """Keras' own seed, with the replica's index folded in."""
        seed = super().next(ordered)  # type: ignore[misc]
        index = getattr(self, _ATTRIBUTE)()
        if isinstance(index, int):
            offset = index * SPACING % 2**31
            return seed + keras.ops.convert_to_tensor(np.array([offset, 0]), seed.dtype) if offset else seed
        offset = keras.ops.cast(index, seed.dtype) * SPACING % 2**31
        return seed + keras.ops.stack([offset, keras.ops.zeros_like(offset)])


def draw_by_replica(generator: Any, index: Callable[[], Any]) -> None:
    """Makes ``generator``'s seeds depend on the replica, once, in place; ``index`` may be traced, 0 outside of them."""
    if hasattr(generator, _ATTRIBUTE):
        return
    setattr(generator, _ATTRIBUTE, index)
    generator.__class__ = derive(type(generator), _ReplicaDrawsMixin)


def draw_by_rank(model: Any) -> None:
    """Makes random numbers differ by rank, before ``attach``; steps for all ranks' devices draw the global batch's."""
    if not has_others(global_process_set) or spans_ranks():
        return
    rank = global_process_set.communicator.rank
    own = global_seed_generator()  # of random functions without a seed
    for generator in [*([] if own is None else [own]), *seed_generators_of(model)]:
        draw_by_replica(generator, lambda: rank)
    numbers_of = {"torch": torch_numbers_of, "tensorflow": tensorflow_numbers_of}.get(keras.backend.backend())
    if numbers_of is not None and not hasattr(model, _ATTRIBUTE):
        object.__setattr__(model, _ATTRIBUTE, rank)
        model.train_step = numbers_of(rank)(model.train_step)  # in which each call is such a block


#: What reads and continues the streams of libraries that may be loaded.
_STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "random": (random.getstate, random.setstate),
    "numpy": (lambda: np.random.get_state(legacy=False), np.random.set_state),
    "torch": (torch_streams, set_torch_streams),
    "tensorflow": (tensorflow_streams, set_tensorflow_streams),
}


def random_streams() -> dict[str, Any]:
    """The global random streams' states, as plain values; Keras' generators are variables."""
    return {name: read() for name, (read, _) in _STREAMS.items() if sys.modules.get(name) is not None}


def set_random_streams(streams: dict[str, Any]) -> None:
    """Continues the streams of ``random_streams``, of libraries that this process has loaded, too."""
    for name, (_, set_state) in _STREAMS.items():
        if name in streams and sys.modules.get(name) is not None:
            set_state(streams[name])
