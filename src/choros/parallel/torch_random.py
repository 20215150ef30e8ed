"""PyTorch's own random numbers, which differ between replicas while a training step runs.

Keras' dropout without a seed draws them on PyTorch, as ``torch.nn.Dropout`` does. Between steps all processes have the
same stream, if they were seeded the same: data sets are shuffled with it. A step takes one number from it::

    process 0    ── shuffle ──┬─────────────── n ───────────────┬── shuffle ──
                              └─► manual_seed(n), dropout, …    │
    process 1    ── shuffle ──┬─────────────── n ───────────────┬── shuffle ──
                              └─► manual_seed(n + spacing), …   │
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SPACING", "torch_numbers_of"]

#: The difference of two replicas' seeds: odd, so that no two replicas have the same seed, and large, because seeds that
#: are close may be used for successive numbers.
SPACING = 747796405


@contextmanager
def torch_numbers_of(replica: int) -> Iterator[None]:
    """The block in which PyTorch's default generators draw the numbers of a replica.

    Args:
        replica: its index.
    """
    import torch

    seed = int(torch.randint(2**31, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed((seed + replica * SPACING) % 2**31)
        yield
