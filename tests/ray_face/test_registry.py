"""The registry of an executor and a rank that looks for an actor, without a Ray."""

from __future__ import annotations

import pytest

from choros.errors import LaunchError
from choros.ray.rank import ActorTie
from choros.ray.registry import ActorRegistry


def test_a_rank_does_not_wait_for_ever_for_an_actor(monkeypatch):
    monkeypatch.setenv("CHOROS_SECRET", "5e" * 32)
    registry = ActorRegistry("5e" * 32, None, 0.1)
    try:
        with pytest.raises(LaunchError, match=r"^rank 0 has waited 0.1 s for a worker .* Call start\(\) again"):
            ActorTie(registry.address)
    finally:
        registry.close()
