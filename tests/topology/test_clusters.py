"""Clusters that start the same command on each host: what their variables say."""

import json

import pytest

from choros.errors import ConfigError
from choros.topology.clusters import PORT, ClusterHost, find_cluster

SECRET = {"CHOROS_SECRET": "00ff" * 8}
SAGEMAKER = {"SM_HOSTS": '["algo-10", "algo-1", "algo-2"]', "SM_NUM_GPUS": "0"}
POOLS = {"workerpool1": ["b-0:2222", "b-1:2222"], "workerpool0": ["a-0:2222"], "ps": ["c:1"]}
SECOND = ClusterHost("SageMaker", 1, 3, "algo-1", port=7)


def vertex(kind, index):
    return {"CLUSTER_SPEC": json.dumps({"cluster": POOLS, "task": {"type": kind, "index": index}, "job": {}})}


def aws(index, main=0):
    given = {"AWS_BATCH_JOB_NODE_INDEX": index, "AWS_BATCH_JOB_MAIN_NODE_INDEX": main, "AWS_BATCH_JOB_NUM_NODES": 4}
    address = {} if index == main else {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.9"}
    return {name: str(value) for name, value in given.items()} | address


def kubeflow(**more):
    return {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "t-node-0-0.t",
        "PET_MASTER_PORT": "29400",
        **more,
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"SKYPILOT_NODE_IPS": "a\nb\n", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
            ClusterHost("SkyPilot", 0, 2, "a", 8),
        ),
        (aws(0), ClusterHost("AWS Batch", 0, 4)),
        (aws(3), ClusterHost("AWS Batch", 3, 4, "10.0.0.9")),
        (aws(0, main=2), ClusterHost("AWS Batch", 1, 4, "10.0.0.9")),
        (aws(3, main=2), ClusterHost("AWS Batch", 3, 4, "10.0.0.9")),
        (aws(2, main=2), ClusterHost("AWS Batch", 0, 4)),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-10"}, ClusterHost("SageMaker", 2, 3, "algo-1")),
        (
            {**SAGEMAKER, "SM_CURRENT_HOST": "algo-2", "MASTER_PORT": "7"},
            ClusterHost("SageMaker", 1, 3, "algo-1", port=7),
        ),
        (vertex("workerpool0", 0), ClusterHost("Vertex AI", 0, 3, "a-0")),
        (vertex("workerpool1", 1), ClusterHost("Vertex AI", 2, 3, "a-0")),
        (kubeflow(), ClusterHost("Kubeflow", 1, 2, "t-node-0-0.t", port=29400)),
        (kubeflow(PET_NPROC_PER_NODE="4"), ClusterHost("Kubeflow", 1, 2, "t-node-0-0.t", 4, 29400)),
        (
            kubeflow(PET_NPROC_PER_NODE="auto", JOB_COMPLETION_INDEX="1", **SECRET),
            ClusterHost("Kubeflow", 1, 2, "t-node-0-0.t", port=29400),
        ),
        ({"JOB_COMPLETION_INDEX": "3", **SECRET}, ClusterHost("an Indexed Job", 3, None, "train-0.svc.ns")),
        ({"SKYPILOT_NODE_IPS": "a", "SKYPILOT_NODE_RANK": "0"}, None),
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # a sweep
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"CLUSTER_SPEC": '{"worker": ["a:1", "b:1"]}'}, None),
    ],
)
def test_which_host_this_is(environ, expected):
    found = find_cluster(environ, lambda: "train-3.svc.ns")
    assert found == expected
    assert found is None or found.port in (PORT, 7, 29400)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SKYPILOT_NODE_IPS": "a\nb"}, "SKYPILOT_….*SKYPILOT_NODE_RANK"),
        ({"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "2"}, "number 2 of 2"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "SM_….*algo-3"),
        ({"CLUSTER_SPEC": '{"workerpool0"'}, "CLUSTER_SPEC"),
        (vertex("workerpool2", 0), "CLUSTER_SPEC"),
        (kubeflow(PET_MASTER_ADDR=""), "does not say where the first host is"),
        (kubeflow(PET_MASTER_PORT="0"), "'0'.*not a port"),
        ({"JOB_COMPLETION_INDEX": "1", **SECRET}, "headless service"),
    ],
)
def test_variables_that_contradict_each_other(environ, message):
    with pytest.raises(ConfigError, match=message):
        find_cluster(environ, lambda: "localhost")
