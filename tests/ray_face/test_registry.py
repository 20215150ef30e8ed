"""The registry of an executor and a rank that looks for an actor, without a Ray."""

from __future__ import annotations

import pytest

from choros.errors import LaunchError
from choros.ray.rank import REGISTRY, ActorTie, Take
from choros.ray.registry import ActorRegistry, RankActor
from choros.transport.channel import connect
from choros.transport.secret import Key


def test_a_rank_does_not_wait_for_ever_for_an_actor(monkeypatch):
    monkeypatch.setenv("CHOROS_SECRET", "5e" * 32)
    registry = ActorRegistry("5e" * 32, None, 0.1)
    try:
        with pytest.raises(LaunchError, match=r"^rank 0 has waited 0.1 s for a worker .* Call start\(\) again"):
            ActorTie(registry.address)
    finally:
        registry.close()


def test_a_rank_learns_of_its_actor_before_it_learns_of_others():
    """Whenever other ranks come: those that are there are told then which actors are vacant."""
    registry = ActorRegistry("5e" * 32, None, 5.0)
    first, second = (RankActor(None, None, None) for _ in range(2))
    first.note_place("node", "machine", "127.0.0.1:1", ["0"])
    second.note_place("node", "machine", "127.0.0.1:2", ["10"])
    registry.add(first, second)

    class Another(dict):
        def __setitem__(self, channel, take):
            super().__setitem__(channel, take)
            registry._tell()  # as another one does just now

    registry._ranks = Another()
    rank = connect(registry.address, Key(bytes.fromhex("5e" * 32)), "rank", REGISTRY, 5.0)
    try:
        rank.send(Take(0, "machine", "host"))
        assert rank.receive() == ("127.0.0.1:1", {"CUDA_VISIBLE_DEVICES": "0,10"})
        assert rank.receive() == {"host": 1}
    finally:
        rank.close()
        registry.close()
