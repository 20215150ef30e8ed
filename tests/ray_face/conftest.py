"""Tests on a real Ray: ``pytest -m ray tests/ray_face`` runs them, on one cluster; other calls skip them."""

from __future__ import annotations

import importlib.util
import os
import uuid

import psutil
import pytest

REASON = "Ray's tests are a stage of their own: pytest -m ray tests/ray_face"
#: All processes of the cluster, ranks too, have this variable, with the cluster's mark.
MARK = "CHOROS_TEST_RAY_CLUSTER"


def missing() -> str | None:
    return None if importlib.util.find_spec("ray") else "needs Ray: pip install 'choros[ray]'"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = missing() if "ray" in config.getoption("markexpr", "") else REASON
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # Ray's own
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster():
    """A cluster of one node with two CPUs; tests add and lose others. Nothing of it is left at the end."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ[MARK] = mark = uuid.uuid4().hex
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=own.address, log_to_driver=True)
    yield own
    ray.shutdown()
    own.shutdown()
    del os.environ[MARK]
    left = psutil.wait_procs(marked(mark), 20)[1]
    assert not left, [process.cmdline() for process in left]


def marked(mark: str) -> list[psutil.Process]:
    """The processes with a cluster's mark, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def pid_of(actor) -> int:
    """The process of an executor's actor."""
    import ray

    return ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()))
