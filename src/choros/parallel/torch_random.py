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
from typing import Any

__all__ = ["SPACING", "set_torch_streams", "torch_numbers_of", "torch_streams"]

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
