"""What ranks are compared with, computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import choros
from choros.parallel.objects import broadcast_object

__all__ = ["of_one_rank"]


def of_one_rank(compute: Callable[[], Any]) -> Any:
    """Calls ``compute`` on rank 0; returns its result, which can be pickled, on all ranks."""
    return broadcast_object(compute() if choros.rank() == 0 else None)
