"""``TF_CONFIG``: what it says, and what is wrong with it."""

import json

import pytest

from choros.errors import ConfigError
from choros.topology import TFConfig, read_tf_config

WORKER_0 = {"type": "worker", "index": 0}


def config(cluster: object, task: object = WORKER_0, **rest: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **rest})}


def test_what_it_says() -> None:
    cluster = {"worker": ["b:1", "[fd00::1]:1"], "master": ["a:1"], "ps": ["p:1"]}
    read = read_tf_config(config(cluster, {"type": "worker", "index": "1"}, rpc_layer="grpc"))
    assert read is not None
    assert read == TFConfig({"worker": ("b:1", "[fd00::1]:1"), "chief": ("a:1",), "ps": ("p:1",)}, "worker", 1, "grpc")
    assert (read.ranks, read.rank) == (("a:1", "b:1", "[fd00::1]:1"), 2)
    assert read_tf_config({"TF_CONFIG": read.text()}) == read


def test_another_task_in_place_of_its_own() -> None:
    environ = config({"worker": ["a:1"], "ps": ["b:1"]}, {})
    assert read_tf_config(environ, "ps", 0) == TFConfig({"worker": ("a:1",), "ps": ("b:1",)}, "ps", 0)


@pytest.mark.parametrize(
    ("role", "index", "rank"), [("chief", 0, 0), ("worker", 1, 2), ("ps", 0, None), ("evaluator", 3, None)]
)
def test_ranks(role: str, index: int, rank: int | None) -> None:
    assert TFConfig.of({"ps": ["p:1"], "worker": ["a:1", "a:2"], "chief": ["a:3"]}, role, index).rank == rank


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, config({})])
def test_no_cluster_to_be_part_of(environ: dict[str, str]) -> None:
    assert read_tf_config(environ) is None


ONE = {"worker": ["a:1"]}
MALFORMED = {
    "no JSON": ({"TF_CONFIG": "{'cluster': {}}"}, "It is not JSON (Expecting property name"),
    "no object": ({"TF_CONFIG": "[]"}, 'It has no "cluster": name the addresses'),
    "no cluster": ({"TF_CONFIG": "{}"}, 'It has no "cluster": name the addresses'),
    "a cluster that is none": (config(["a:1"]), "The cluster is ['a:1'], not an object"),
    "addresses that are no list": (config({"worker": "a:1"}), "cluster['worker'] is 'a:1', not a list of addresses"),
    "a role nobody knows": (config({"workers": ["a:1"]}), "'workers', which is none of chief, worker, ps, evaluator"),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": ONE})}, 'add a "task" with a "type" and an "index"'),
    "half a task": (config(ONE, {"type": "worker"}), 'add a "task" with a "type" and an "index"'),
    "a task that is none": (config(ONE, "worker"), "\"task\" is 'worker', not an object"),
    "a task of a role nobody knows": (config(ONE, {"type": "boss", "index": 0}), "to be a 'boss', which is none of"),
    "an index that is no number": (config(ONE, {"type": "worker", "index": "x"}), "worker 'x': its index must be"),
    "an index below 0": (config(ONE, {"type": "worker", "index": -1}), "worker -1: its index must be"),
    "an index out of range": (
        config({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 2}),
        "to be worker 2, but of these the cluster has 2: worker 0 … 1. Add the task's address",
    ),
    "one task only": (config(ONE, {"type": "worker", "index": 1}), "the cluster has worker 0 only"),
    "a role that is not there": (
        config(ONE, {"type": "ps", "index": 0}),
        "to be ps 0, but of these the cluster has none",
    ),
    "no port": (config({"worker": ["a:1", "b"]}), "Of worker 1, 'b' is no address: expected host:port"),
    "a port that is none": (config({"worker": ["a:0"]}), "'a:0' is no address"),
    "no host": (config({"worker": [":1"]}), "':1' is no address"),
    "IPv6 without brackets": (config({"worker": ["fd00::1:1"]}), "'fd00::1:1' is no address"),
    "two chiefs": (
        config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}),
        "2 chiefs (a:1, b:1); make all but one workers",
    ),
    "chief and master": (config({"chief": ["a:1"], "master": ["b:1"], "worker": ["c:1"]}), "2 chiefs"),
    "one address twice": (
        config({"worker": ["a:1"], "ps": ["a:1"]}),
        "worker 0 and ps 0 have one address, 'a:1': each needs a port of its own",
    ),
}


@pytest.mark.parametrize(("environ", "says"), MALFORMED.values(), ids=MALFORMED)
def test_malformed(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_tf_config(environ)
    text = str(raised.value)
    assert text.startswith("TF_CONFIG cannot be used. ")
    assert says in text
    assert 'Expected JSON like {"cluster": {"worker": ["host1:2222"' in text
    assert text.endswith(f"got {environ['TF_CONFIG']!r}.")
