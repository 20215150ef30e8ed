"""MultiWorkerMirroredStrategy without mpirun: a plain Python process on each of two hosts (network namespaces)."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import choros
from choros import distribute
from choros.errors import ConfigError, EngineUnavailable
from choros.topology import ENVIRONMENTS
from comm.starts import step_of_slurm, together
from harness import FRAMEWORKS, free_port, needs
from launch.namespaces import Network, several_hosts
from warm.servers import warm_python

pytestmark = needs("torch")  # sends the gradients of ranks that MPI did not start

SCRIPT = str(Path(__file__).parent / "worker_script.py")
#: The source of the workers' addresses on each framework; the worker that dies has a resolver without ``TF_CONFIG``.
#: TensorFlow's gradients reach the engine as JAX' do, in host memory; PyTorch's are its own tensors.
WAYS = {"tensorflow": "environment", "torch": "tf_config_resolver"}
#: Runs the command in the namespace given by the environment.
ON_ITS_HOST = ("sh", "-c", 'exec ip netns exec "$HOST" "$@"', "sh")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with several_hosts(tmp_path_factory.mktemp("reach")) as network:
        yield network


def tf_config(workers: list[str], index: int) -> str:
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


@pytest.mark.slow
@pytest.mark.parametrize("framework", [framework for framework in WAYS if framework in FRAMEWORKS])
def test_two_hosts_train_as_one_process(network: Network, framework: str) -> None:
    workers = [f"{host}:2222" for host in network.hosts]
    # Without a secret, hosts cannot tell the job's processes from others, and the first rank says so.
    secret = {"CHOROS_SECRET": "ab" * 16} if framework == FRAMEWORKS[0] else {}
    environs = [
        {"KERAS_BACKEND": framework, "HOST": namespace, "TF_CONFIG": tf_config(workers, index), **secret}
        for index, namespace in enumerate(network.namespaces)
    ]
    outcomes = together([*ON_ITS_HOST, sys.executable, SCRIPT, WAYS[framework]], environs)
    for rank, (code, output) in enumerate(outcomes):
        assert code == 0, output
        assert "as one process" in output
        assert re.search("rejected: MirroredStrategy is for .* one host, .* runs on 2: use MultiWorkerMirrored", output)
        warned = "CHOROS_SECRET is not set, and the ranks are on 2 hosts" in output
        assert warned == (rank == 0 and not secret), output


@pytest.mark.slow
def test_tasks_of_a_slurm_step_on_two_hosts_connect(network: Network) -> None:
    nodes = {"SLURM_STEP_NODELIST": ",".join(network.hosts), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    environs = [
        {**environ, **nodes, "HOST": namespace, "SLURM_NODEID": str(index), "SLURM_LOCALID": "0"}
        for index, (environ, namespace) in enumerate(zip(step_of_slurm(2), network.namespaces, strict=True))
    ]
    code = "import choros; choros.init(); print('host', choros.cross_rank(), 'of', choros.cross_size())"
    outcomes = together([*ON_ITS_HOST, sys.executable, "-c", code], environs)
    for rank, (code_of_rank, output) in enumerate(outcomes):
        assert code_of_rank == 0, output
        assert f"host {rank} of 2" in output
        warned = "CHOROS_SECRET is not set, and the ranks are on 2 hosts" in output
        assert warned == (rank == 0), output


@pytest.mark.slow
def test_worker_whose_peer_is_killed_ends_with_an_error() -> None:
    workers = [f"localhost:{free_port()}" for _ in range(2)]
    environs = [{"KERAS_BACKEND": "torch", "TF_CONFIG": tf_config(workers, index)} for index in range(2)]
    (code, output), (code_of_dead, other_output) = together([*warm_python("torch"), SCRIPT, "die"], environs)
    assert code_of_dead == -signal.SIGKILL, other_output
    assert code == 69, output
    assert "PeerLostError" in output
    assert "cannot be completed: rank 1 on " in output


# ── starts that fail ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No launcher has started this process, and timeouts are short."""
    choros.shutdown()
    for launcher in ENVIRONMENTS:
        monkeypatch.delenv(launcher.rank, raising=False)
    monkeypatch.setenv("CHOROS_START_TIMEOUT", "0.2")
    yield monkeypatch
    choros.shutdown()


def test_worker_that_never_connects(start: pytest.MonkeyPatch) -> None:
    start.setenv("TF_CONFIG", tf_config([f"127.0.0.1:{free_port()}", "127.0.0.1:1"], 0))
    with pytest.raises(EngineUnavailable, match=r"rank 1 of 2 did not connect within 0\.2 s"):
        distribute.MultiWorkerMirroredStrategy()


def test_chief_that_never_listens(start: pytest.MonkeyPatch) -> None:
    start.setenv("TF_CONFIG", tf_config([f"127.0.0.1:{free_port()}", "127.0.0.1:1"], 1))
    with pytest.raises(EngineUnavailable, match=r"rank 1: nothing answers at 127\.0\.0\.1:\d+.* within 0\.2 s"):
        distribute.MultiWorkerMirroredStrategy()


def test_port_that_is_taken(start: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start.setenv("TF_CONFIG", tf_config([f"127.0.0.1:{port}", "127.0.0.1:1"], 0))
        with pytest.raises(EngineUnavailable, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port}"):
            distribute.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("worker 0 of 2", "It is not JSON"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "which task this process is"),
        (tf_config(["a:1", "b:1"], 2), "has 2: worker 0 … 1"),
    ],
)
def test_malformed_tf_config(start: pytest.MonkeyPatch, text: str, problem: str) -> None:
    start.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match=f"TF_CONFIG cannot be used.*{problem}.*Expected JSON like"):
        distribute.MultiWorkerMirroredStrategy()


def test_resolver_that_does_not_know_its_task(start: pytest.MonkeyPatch) -> None:
    start.delenv("TF_CONFIG", raising=False)
    resolver = distribute.cluster_resolver.SimpleClusterResolver({"worker": ["a:1", "b:1"]})
    with pytest.raises(ConfigError, match="set its task_type and task_id"):
        distribute.MultiWorkerMirroredStrategy(resolver)
