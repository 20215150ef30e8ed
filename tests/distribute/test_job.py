"""The replicas of a job."""

import sys

import pytest

from choros.distribute import job
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
