"""PyTorch: ``torch.distributed.all_reduce`` on Gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.sum_task import sum_task


def join() -> Prepare:
    """Sums in the default process group."""
    dist.init_process_group("gloo")

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        tensor = torch.empty(case.items, dtype=getattr(torch, case.dtype))

        def reduce() -> list[torch.Tensor]:
            dist.all_reduce(tensor)
            return [tensor]

        return sum_task([tensor], dist.get_world_size(), reduce)

    return prepare


if __name__ == "__main__":
    serve(join)
