"""``join()`` on three ranks, which have 3, 5 and 8 batches of different sizes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence

import pytest
import torch

import choros.torch as hvd
from choros.errors import ConfigError

STEPS = (3, 5, 8)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _earlier_optimizers() -> None:
    gc.collect()


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batch_of(rank: int, step: int) -> Batch:
    """Two rows of ``rank``."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 1, generator=generator)


def batches_of(step: int) -> list[Batch]:
    """Those of all ranks that have one."""
    return [batch_of(rank, step) for rank, steps in enumerate(STEPS) if step < steps]


def backward(model: torch.nn.Module, data: Sequence[Batch]) -> None:
    loss = sum(torch.nn.functional.mse_loss(model(x), y) for x, y in data) / len(data)
    model.zero_grad()
    loss.backward()


def assert_equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def case_two_optimizers_and_other_collectives_in_the_loop() -> None:
    models, references = ([model_of(seed) for seed in range(2)] for _ in range(2))
    optimizers = [hvd.DistributedOptimizer(ADAM(model.parameters())) for model in models]
    plain = [ADAM(model.parameters()) for model in references]
    for step in range(STEPS[hvd.rank()]):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, [batch_of(hvd.rank(), step)])
            optimizer.step()
        ranks = [rank for rank, steps in enumerate(STEPS) if step < steps]
        assert hvd.allreduce(torch.tensor(3.0 * hvd.rank()), name="loss") == sum(ranks)
        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == ranks
    assert hvd.join() == 2
    for step in range(max(STEPS)):
        for model, optimizer in zip(references, plain, strict=True):
            backward(model, batches_of(step))
            optimizer.step()
    for model, reference in zip(models, references, strict=True):
        assert_equal(model, reference)


def case_without_an_optimizer() -> None:
    model, reference = model_of(0), model_of(0)
    optimizer, plain = ADAM(model.parameters()), ADAM(reference.parameters())
    for step in range(STEPS[hvd.rank()]):
        backward(model, [batch_of(hvd.rank(), step)])
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient, mean in zip(gradients, hvd.grouped_allreduce(gradients), strict=True):
            gradient.copy_(mean)
        optimizer.step()
    assert hvd.join() == 2
    hvd.broadcast_parameters(model.state_dict(), root_rank=2)
    for step in range(max(STEPS)):
        backward(reference, batches_of(step))
        for parameter in reference.parameters():  # Horovod's average is over all ranks
            parameter.grad.mul_(len(batches_of(step)) / hvd.size())
        plain.step()
    assert_equal(model, reference)


def case_sums_count_each_batch_once() -> None:
    count = torch.tensor(0.0)
    for step in range(STEPS[hvd.rank()]):
        count += hvd.allreduce(torch.ones(()), op=hvd.Sum)
        assert hvd.allreduce(torch.tensor(step + 1.0), op=hvd.Max) == step + 1
    last = hvd.join()
    assert hvd.broadcast(count, last) == sum(STEPS)


def case_adasum_leaves_out_ranks_that_have_joined() -> None:
    """The changes of the others are equal, so that each step makes one of them; at the end all have the parameters."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5, momentum=0.1), op=hvd.Adasum)
    plain = torch.nn.Parameter(torch.zeros(3))
    reference = torch.optim.SGD([plain], lr=0.5, momentum=0.1)
    for _ in range(STEPS[hvd.rank()]):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert hvd.join() == 2
    for _ in range(max(STEPS)):
        reference.zero_grad()
        plain.sum().backward()
        reference.step()
    torch.testing.assert_close(weight, plain)


def case_optimizers_of_different_process_sets_cannot_join() -> None:
    pairs = [hvd.add_process_set(ranks) for ranks in ([0, 1], [0, 2])]
    models = [model_of(0) for _ in pairs]
    optimizers = [
        hvd.DistributedOptimizer(ADAM(model.parameters()), process_set=pair)
        for model, pair in zip(models, pairs, strict=True)
    ]
    if hvd.rank() == 0:
        with pytest.raises(ConfigError, match="belong to 2 process sets"):
            hvd.join()
    del optimizers
    for pair in pairs:
        hvd.remove_process_set(pair)
