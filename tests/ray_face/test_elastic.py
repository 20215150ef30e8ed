"""Elastic jobs on a real Ray: whatever is killed, each row of an epoch is trained on once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ray_face import training
from ray_face.conftest import pid_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]


def trained(cluster, folder, fault, *, starts_with, add_node=False, until=0, **given):
    """The reports of an elastic job, during whose first epoch ``fault`` is called with the executor and a new node."""
    from choros.ray import RayExecutor

    node = cluster.add_node(num_cpus=1) if add_node else None
    job = RayExecutor(RayExecutor.create_settings(), env_vars={"KERAS_BACKEND": "torch"}, min_workers=1, **given)
    job.start()
    # Ray may be slow to start the last ones.
    assert job.adapter._pool.registry.wait(lambda actors: len(actors) >= starts_with, 120)
    problems = []

    def disturb():
        while not (folder / "middle").exists():
            time.sleep(0.05)
        try:
            fault(job, node)
        except Exception as error:  # noqa: BLE001  (shown by the test)
            problems.append(error)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        return job.run(training.count_rows, args=[6, str(folder), until])
    finally:
        thread.join(20)
        job.shutdown()
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
        assert not problems, problems


def check(reports) -> None:
    for report in reports:
        assert report["counts"] == [report["epochs"]], report  # the weights of a run that nothing disturbs


def kill_an_actor(job, node) -> None:
    actor = next(each for each in job.adapter._pool.registry.actors if each.rank == 1)
    os.kill(pid_of(actor), signal.SIGKILL)


def kill_a_node(job, node) -> None:
    raylet = node.all_processes["raylet"][0].process
    raylet.kill()
    raylet.wait()


def drain_a_node(job, node) -> None:
    command = [Path(sys.executable).with_name("ray"), "drain-node", "--address", node.gcs_address]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    subprocess.run(
        [*command, "--node-id", node.node_id, *reason, "--deadline-remaining-seconds", "60"], check=True, timeout=60
    )


def test_a_killed_actor_is_replaced(cluster, tmp_path) -> None:
    reports = trained(cluster, tmp_path, kill_an_actor, starts_with=2, max_workers=2, until=2)
    check(reports)
    assert [report["size"] for report in reports] == [2, 2]
    assert min(map(int, (tmp_path / "sizes").read_text().split())) == 1


@pytest.mark.parametrize("fault", [kill_a_node, drain_a_node])
def test_a_node_goes(cluster, tmp_path, fault) -> None:
    reports = trained(cluster, tmp_path, fault, starts_with=3, add_node=True, max_workers=3)
    check(reports)
    assert [report["size"] for report in reports] == [2, 2]
    assert all(report["fewest"] == 2 for report in reports)


def test_an_actor_that_comes_late(cluster, tmp_path) -> None:
    import ray

    class Other:
        def is_there(self) -> bool:
            return True

    other = ray.remote(num_cpus=1)(Other).remote()  # another program's, which has a CPU of the cluster
    ray.get(other.is_there.remote())
    reports = trained(cluster, tmp_path, lambda *_: ray.kill(other), starts_with=1, max_workers=2, until=2)
    check(reports)
    assert [report["size"] for report in reports] == [2, 2]
    assert reports[0]["fewest"] == 1
