"""The gradient noise scale in a loop, where a rank's batch counts as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import choros
import choros.torch as hvd
from choros import NoiseScale
from choros.parallel.objects import allgather_object
from choros.settings import Config, current


def train(monkeypatch: pytest.MonkeyPatch, every: int, overlap: str) -> list[torch.Tensor]:
    settings = replace(current(), noise_scale=every, overlap=Config.from_environ({"CHOROS_OVERLAP": overlap}).overlap)
    monkeypatch.setattr("choros.settings._config", settings)
    generator = torch.Generator().manual_seed(choros.rank())
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.01))
    for _ in range(6):
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def check(monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    plain = train(monkeypatch, 0, overlap)
    measured = train(monkeypatch, 2, overlap)
    assert all(map(torch.equal, plain, measured))
    found = choros.noise_scale()
    assert found is not None
    assert (found.steps, found.batch) == (3, choros.size())
    assert choros.noise_scale(rows=8) == NoiseScale(8 * found.noise_scale, 8 * choros.size(), 3)
    assert allgather_object(found) == [found] * choros.size()


def case_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "0")


def case_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "1")
