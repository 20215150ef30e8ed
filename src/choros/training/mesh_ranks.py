"""The ranks of a job as the processes of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import numpy as np

from choros.comm import Request, global_process_set
from choros.errors import ConfigError
from choros.training.spmd_trainer import Peers

__all__ = ["Ranks"]


@final
class Ranks(Peers):
    """All ranks, which communicate through the host."""

    def agree(self, layout: str, examples: int, problem: ConfigError | None) -> Sequence[int]:
        """Sends one control message."""
        communicator = global_process_set.communicator
        return communicator.atomic(lambda: communicator.agree(_request(layout), value=examples, problem=problem))

    def share(self, number: float, root: int) -> float:
        """Broadcasts the number."""
        return float(global_process_set.communicator.broadcast(np.float64(number), root, name="learning rate"))


@functools.lru_cache(maxsize=16)
def _request(layout: str) -> Request:
    return Request("batch", layout)
