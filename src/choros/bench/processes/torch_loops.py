"""A plain PyTorch training loop: with ``choros``' optimizer, ``ddp`` on Gloo, or ``horovod``'s optimizer."""

import importlib
import os
from typing import Any

import torch
from torch import nn

from choros.bench.cases import CLASSES, EXAMPLES, batches
from choros.bench.channel import Prepare, Task, serve_one_of
from choros.topology import detect


def hooked(library: str) -> Prepare:
    """Trains with the distributed optimizer of ``library``: Horovod, or a module with Horovod's API."""
    hvd = importlib.import_module(library)
    hvd.init()

    def prepare(case: Any) -> Task:
        model, optimizer = build(case.model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return loop_task(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), case)

    return prepare


def ddp() -> Prepare:
    """Trains a model in ``DistributedDataParallel``."""
    import torch.distributed as dist

    process = detect(os.environ)
    dist.init_process_group("gloo", rank=process.rank, world_size=process.size)

    def prepare(case: Any) -> Task:
        model, optimizer = build(case.model)
        return loop_task(nn.parallel.DistributedDataParallel(model), optimizer, case)

    return prepare


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the models of ``keras_fit.py`` in PyTorch, with their optimizers."""
    torch.manual_seed(0)
    if name == "cnn":
        convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Dropout(0.25), nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5)]
        model = nn.Sequential(*convolutions, *dense, nn.Linear(128, CLASSES))
        return model, torch.optim.Adam(model.parameters())
    inputs = EXAMPLES[name][0]
    hidden = [nn.Linear(inputs, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(4096, CLASSES))
    if name == "mlp-adam":
        return model, torch.optim.Adam(model.parameters())
    return model, torch.optim.SGD(model.parameters(), 0.01)


def loop_task(model: nn.Module, optimizer: Any, case: Any) -> Task:
    """Returns the training loop as a task whose unit is a step."""
    steps = 16
    images, labels = map(torch.from_numpy, batches(case, steps, case.batch))
    if case.model == "cnn":
        images = images.movedim(-1, 2).contiguous()
    loss = nn.CrossEntropyLoss()

    def run(units: int) -> None:
        for unit in range(units):
            optimizer.zero_grad()
            loss(model(images[unit % steps]), labels[unit % steps]).backward()
            optimizer.step()

    return Task(run)


if __name__ == "__main__":
    serve_one_of(hooked, ddp)
