"""Cluster resolvers: their results and errors."""

import json
import os
import sys
from types import SimpleNamespace as Is

import pytest

from choros.distribute.cluster_resolver import (
    ClusterSpec,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    tf_config_of,
)
from choros.errors import ConfigError, LaunchError
from choros.topology import Master, Topology, detect, expand_hosts, find_master

CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}
#: Four tasks: one on x, two on b, one on a.
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "x,b,a", "SLURM_STEP_TASKS_PER_NODE": "1,2,1"}


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """The environment, without the variables of launchers."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TF_CONFIG", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


# ── the cluster ──────────────────────────────────────────────────────────────────────────────────


def test_cluster_spec():
    spec = ClusterSpec(CLUSTER)
    assert spec.jobs == ["chief", "worker", "ps"]
    assert spec.as_dict() == CLUSTER
    assert (spec.job_tasks("worker"), spec.num_tasks("ps"), spec.task_address("worker", 1)) == (
        ["a:1", "b:1"],
        1,
        "b:1",
    )
    assert spec == ClusterSpec(spec) == ClusterSpec(Is(as_dict=lambda: CLUSTER))  # TensorFlow's has as_dict
    assert spec
    assert not ClusterSpec({})


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: ClusterSpec("a:1"), "expected a dictionary with a list of addresses for each job"),
        (lambda: ClusterSpec({"worker": "a:1"}), "the tasks of 'worker' are 'a:1', not a list"),
        (lambda: ClusterSpec(CLUSTER).job_tasks("boss"), "no job 'boss' in the cluster; it has chief, worker, ps"),
        (lambda: ClusterSpec(CLUSTER).task_address("worker", 2), "'worker' has 2 tasks, counted from 0, and no task 2"),
    ],
)
def test_an_invalid_cluster_or_task_is_an_error(ask, message):
    with pytest.raises(ConfigError, match=message):
        ask()


# ── Simple ───────────────────────────────────────────────────────────────────────────────────────


def test_simple():
    resolver = SimpleClusterResolver(ClusterSpec(CLUSTER), "m:1", "worker", 1, "google", {"GPU": 8}, "grpc")
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "google")
    assert (resolver.num_accelerators(), resolver.rpc_layer) == ({"GPU": 8}, "grpc")
    assert (resolver.master(), resolver.master("ps", 0)) == ("grpc://m:1", "grpc://p:1")
    resolver.task_type, resolver.task_id = "ps", 0
    assert detect({"TF_CONFIG": tf_config_of(resolver)}) == Topology(launcher="TF_CONFIG")


def test_joining_by_a_resolver_equals_joining_by_tf_config():
    topologies = [detect({"TF_CONFIG": tf_config_of(SimpleClusterResolver(CLUSTER, "", *task))}) for task in TASKS]
    assert [(each.rank, each.size, each.launcher) for each in topologies] == [(i, 3, "TF_CONFIG") for i in range(3)]
    environ = {"TF_CONFIG": tf_config_of(SimpleClusterResolver(CLUSTER, "", "worker", 1))}
    assert find_master(environ, "TF_CONFIG") == Master("c", 1)


TASKS = [("chief", 0), ("worker", 0), ("worker", 1)]


@pytest.mark.parametrize(
    ("resolver", "message"),
    [
        (SimpleClusterResolver(CLUSTER), "SimpleClusterResolver does not know which task of the cluster this process"),
        (SimpleClusterResolver(CLUSTER, "", "worker", 2), "to be worker 2, but of these the cluster has 2"),
        (
            SimpleClusterResolver({"worker": ["a"]}, "", "worker", 0),
            "Of worker 0, 'a' is no address: expected host:port",
        ),
    ],
)
def test_an_invalid_task_cannot_join(resolver, message):
    with pytest.raises(ConfigError, match=message):
        tf_config_of(resolver)


# ── TF_CONFIG ────────────────────────────────────────────────────────────────────────────────────


def test_tf_config(environ):
    environ(TF_CONFIG=json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}))
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert (resolver.master(), resolver.master("ps", 0, "x")) == ("grpc://b:1", "x://p:1")
    assert json.loads(tf_config_of(resolver))["task"] == {"type": "worker", "index": 1}
    environ(TF_CONFIG=json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}))
    assert (resolver.task_id, resolver.master()) == (0, "")  # it reads the variable again; a single task has no master


def test_tf_config_overridden(environ):
    environ(TF_CONFIG=json.dumps({"cluster": CLUSTER}))
    resolver = TFConfigClusterResolver("ps", 0, "grpc")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "grpc://p:1")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "x"
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "x://b:1")


def test_no_tf_config(environ):
    resolver = TFConfigClusterResolver()
    assert (resolver.cluster_spec().jobs, resolver.task_type, resolver.task_id) == ([], None, None)
    assert (resolver.master(), tf_config_of(resolver), resolver.num_accelerators()) == ("", "", {})
    environ(TF_CONFIG="{")
    with pytest.raises(ConfigError, match=r"TF_CONFIG cannot be used\. It is not JSON"):
        resolver.cluster_spec()


# ── SLURM ────────────────────────────────────────────────────────────────────────────────────────


def test_slurm_hosts_are_in_the_order_of_ranks(environ):
    environ(**SLURM, SLURM_PROCID="2", SLURM_NODEID="1", SLURM_LOCALID="1")
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == ("worker", 2)
    assert resolver.cluster_spec().as_dict() == {"worker": ["x:8888", "b:8888", "b:8889", "a:8888"]}
    assert (resolver.master(), resolver.master("worker", 0, "x")) == ("grpc://b:8889", "x://x:8888")
    topology = detect({**os.environ, "TF_CONFIG": tf_config_of(resolver)})
    assert (topology.rank, topology.size, topology.local_rank, topology.launcher) == (2, 4, 1, "TF_CONFIG")


def test_slurm_jobs(environ):
    environ(**SLURM, SLURM_PROCID="1")
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1, "chief": 1}, port_base=1000)
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.cluster_spec().as_dict() == {"chief": ["x:1000"], "ps": ["b:1000"], "worker": ["b:1001", "a:1000"]}


@pytest.mark.parametrize(
    ("given", "workers"),
    [(2, ["x:1", "x:2", "b:1", "b:2", "a:1", "a:2"]), ({"z": 1, "y": 2}, ["z:1", "y:1", "y:2"])],
)
def test_slurm_tasks_per_node(environ, given, workers):
    environ(**{**SLURM, "SLURM_STEP_NUM_TASKS": str(len(workers))}, SLURM_PROCID="0")
    assert SlurmClusterResolver(port_base=1, tasks_per_node=given).cluster_spec().job_tasks("worker") == workers


@pytest.mark.parametrize(
    ("variables", "how", "gpus", "visible"),
    [
        ({}, {}, 0, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, {}, 2, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, 2, "6,7"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"gpus_per_task": 1}, 1, "5"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"auto_set_gpu": False}, 2, "4,5,6,7"),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"}, {}, 1, "0"),  # SLURM has assigned them
        ({}, {"gpus_per_node": 2}, 1, "1"),
    ],
)
def test_slurm_gpus(environ, variables, how, gpus, visible):
    environ(**SLURM, SLURM_PROCID="2", **variables)
    resolver = SlurmClusterResolver(**how)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == variables.get("CUDA_VISIBLE_DEVICES")
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert resolver.num_accelerators() == {"GPU": gpus}


@pytest.mark.parametrize(
    ("variables", "how", "message"),
    [
        (
            {"SLURM_PROCID": ""},
            {},
            "SLURM_PROCID is not set: this is not a SLURM job step. Start the script with srun",
        ),
        ({"SLURM_PROCID": "one"}, {}, "SLURM_PROCID='one' is not a whole number"),
        ({"SLURM_PROCID": "4"}, {}, "SLURM_PROCID=4, but there are 4 tasks"),
        (
            {},
            {"jobs": {"worker": 5}},
            r"5 tasks, but SLURM has started 4 \(1 on x, 2 on b, 1 on a\). Start .*--ntasks=5",
        ),
        ({"SLURM_STEP_NODELIST": "a[1-"}, {}, r"'a\[1-' is not a list of hosts such as"),
        ({"SLURM_STEP_NODELIST": "a"}, {}, "has 3 hosts, but SLURM_STEP_NODELIST has 1"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "x"},
            {},
            r"SLURM_STEP_TASKS_PER_NODE='x' is not a list of counts such as 2\(x3\)",
        ),
        ({"SLURM_NODEID": "0"}, {}, "SLURM_PROCID=1 has SLURM_NODEID=0, but expected 1.*--distribution=block"),
        (
            {},
            {"gpus_per_node": 1, "gpus_per_task": 1},
            "2 tasks on one host with gpus_per_task=1 need more GPUs than its 1",
        ),
    ],
)
def test_inconsistent_slurm_variables_are_an_error(environ, variables, how, message):
    environ(**{**SLURM, "SLURM_PROCID": "1", **variables})
    with pytest.raises(ConfigError, match=message):
        SlurmClusterResolver(**how)


@pytest.mark.parametrize("text", ["", "a b", "a[x]", "a[1-x]", "a[]"])
def test_an_invalid_list_of_hosts_is_an_error(text):
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        expand_hosts(text)


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────


def pod(name, address, phase="Running"):
    return Is(metadata=Is(name=name), status=Is(phase=phase, pod_ip=address, host_ip=f"host-of-{name}"))


class Client:
    """Kubernetes, with two pods for one selector and one for another."""

    def __init__(self):
        self.pods = {"job=w": [pod("w-1", "10.1.0.2"), pod("w-0", "fd00::1")], "job=p": [pod("p-0", "10.1.0.3")]}

    def list_pod_for_all_namespaces(self, label_selector):
        return Is(items=self.pods[label_selector])


JOBS = {"worker": ["job=w"], "ps": ["job=p"]}


def test_kubernetes():
    resolver = KubernetesClusterResolver(JOBS, 99, override_client=Client())
    assert resolver.cluster_spec().as_dict() == {"worker": ["[fd00::1]:99", "10.1.0.2:99"], "ps": ["10.1.0.3:99"]}
    assert (resolver.master(), resolver.master("ps", 0)) == ("", "grpc://10.1.0.3:99")
    with pytest.raises(ConfigError, match="KubernetesClusterResolver does not know which task"):
        tf_config_of(resolver)
    resolver.task_type, resolver.task_id = "worker", 1
    assert json.loads(tf_config_of(resolver))["task"] == {"type": "worker", "index": 1}


def test_kubernetes_from_outside_the_cluster():
    outside = KubernetesExecutableLocation.OFF_CLUSTER
    resolver = KubernetesClusterResolver(JOBS, override_client=Client(), executable_location=outside)
    assert resolver.cluster_spec().job_tasks("ps") == ["host-of-p-0:8470"]


def test_a_pod_that_is_not_running_is_an_error():
    client = Client()
    client.pods = {"job-name=tensorflow": [pod("w-0", None, "Pending")]}
    with pytest.raises(LaunchError, match="pod w-0 is Pending, but all must be Running"):
        KubernetesClusterResolver(override_client=client).cluster_spec()


def test_kubernetes_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match="pip install kubernetes"):
        KubernetesClusterResolver()
