"""The replicas of a job."""

import sys

import pytest

from choros import distribute
from choros.distribute import job, strategy
from choros.distribute.replicas import ProcessReplicas
from choros.topology import Topology


@pytest.mark.parametrize(
    ("topology", "reported"), [(Topology(), True), (Topology(launcher="srun"), False), (Topology(size=2), False)]
)
def test_a_lone_process_says_how_to_have_more_replicas(monkeypatch, caplog, topology, reported):
    monkeypatch.setattr(job, "framework", lambda: "torch")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    job._warn_of_one_replica.cache_clear()
    replicas, _ = job.replicas_of(topology)
    assert isinstance(replicas, ProcessReplicas)
    assert ("chorosrun -np N python" in caplog.text) == reported


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 1)])
def test_ranks_with_the_default_strategy_say_that_each_trains_alone(monkeypatch, caplog, rank, size):
    monkeypatch.setattr(strategy, "is_initialized", lambda: False)
    monkeypatch.setattr(strategy, "detect", lambda _: Topology(rank=rank, size=size))
    strategy._warn_of_several_ranks.cache_clear()
    for _ in range(2):
        with distribute.get_strategy().scope():
            pass
    assert len(caplog.records) == ((rank, size) == (0, 2))
    assert all("scope of a MirroredStrategy()" in each.message for each in caplog.records)
