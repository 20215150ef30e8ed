"""Horovod: ``hvd.allreduce_`` of a torch tensor, in place."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.sum_task import sum_task


def join() -> Prepare:
    """Sums over Horovod's ranks."""
    hvd.init()

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        tensor = torch.empty(case.items, dtype=getattr(torch, case.dtype))
        return sum_task([tensor], hvd.size(), lambda: [hvd.allreduce_(tensor, op=hvd.Sum, name="bench")])

    return prepare


if __name__ == "__main__":
    serve(join)
