"""Makes steps of a fixed amount of work until a file exists; writes when each ended. Without a file: that of 5 ms."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import choros.torch as hvd

SIZE = 128


def work(times: int) -> None:
    """Multiplies matrices so many times."""
    matrix = np.full((SIZE, SIZE), 0.5, np.float32)
    for _ in range(times):
        matrix @ matrix


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until", type=Path, help="this file; beside it, times.txt gets rank 0's")
    parser.add_argument("--work", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.until is None:
        work(1000)
        began = time.perf_counter()
        work(2000)
        print(max(1, round(2000 * 0.005 / (time.perf_counter() - began))))
        return
    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rows, times = torch.ones(8, 64), []
    while len(times) % 100 or not hvd.broadcast_object(arguments.until.exists()):
        work(arguments.work)
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
        times.append(time.time())
    if hvd.rank() == 0:
        arguments.until.with_name("times.txt").write_text("\n".join(map(str, times)))


if __name__ == "__main__":
    main()
