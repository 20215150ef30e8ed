"""A flipped bit in the parameters of one rank, in a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import choros.torch as hvd
from choros.errors import DriftError
from choros.parallel.objects import allgather_object
from choros.settings import current


def train(monkeypatch: pytest.MonkeyPatch, **settings: str) -> torch.nn.Linear:
    monkeypatch.setattr("choros.settings._config", replace(current(), compare_every=4, **settings))
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.01))
    for step in range(1, 10):
        if step == 6 and hvd.rank() == 1:
            module.bias.data.view(torch.int32)[0] ^= 1 << 25
        optimizer.zero_grad()
        module(torch.ones(3, 6) * (hvd.rank() + step)).square().mean().backward()
        optimizer.step()
    return module


def case_a_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriftError, match=r"after step 8, ranks .* of 1 of 2 .* first of 'parameter 1, \(2,\)'"):
        train(monkeypatch)


def case_ranks_are_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = train(monkeypatch, divergence="heal")
    for other in allgather_object([parameter.detach().numpy() for parameter in module.parameters()]):
        for mine, theirs in zip(module.parameters(), other, strict=True):
            torch.testing.assert_close(mine.detach(), torch.from_numpy(theirs), rtol=0, atol=0)
