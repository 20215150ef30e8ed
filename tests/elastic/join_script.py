"""Ranks that join at different steps, one of which is lost; the argument says when rank 0 is killed.

``join``: as it would join, with the last one; else as it would call this function, while the last one sends its values.
"""

import os
import signal
import sys

import torch

import choros.torch as hvd
from choros.torch import optimizer as optimizers

hvd.init()
number, size = hvd.rank(), hvd.size()
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.5), named_parameters=[("w", weight)])
moment = sys.argv[1]
for step in range(2 * size if (number, moment) == (0, "join") else 2 * (number + 1)):
    optimizer.zero_grad()
    (-weight).sum().backward()
    optimizer.step()
    if step == 2:  # rank 0 may have joined
        hvd.broadcast_parameters({"a": torch.zeros(1), "b": torch.zeros(1)}, root_rank=1)
if number == 0:
    setattr(hvd if moment == "join" else optimizers, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
last = hvd.join()
print(
    f"{last} of {hvd.size()}: {weight.item():.3f}, {optimizer.state[weight]['momentum_buffer'].item():.3f}", flush=True
)
