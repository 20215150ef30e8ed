"""``TF_CONFIG``: valid and malformed values."""

import json

import pytest

from choros.errors import ConfigError
from choros.topology import TFConfig, read_tf_config

WORKER_0 = {"type": "worker", "index": 0}


def config(cluster: object, task: object = WORKER_0, **rest: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **rest})}


def test_read() -> None:
    cluster = {"worker": ["b:1", "[fd00::1]:1"], "master": ["a:1"], "ps": ["p:1"]}
    read = read_tf_config(config(cluster, {"type": "worker", "index": "1"}, rpc_layer="grpc"))
    assert read is not None
    assert read == TFConfig({"worker": ("b:1", "[fd00::1]:1"), "chief": ("a:1",), "ps": ("p:1",)}, "worker", 1, "grpc")
    assert (read.ranks, read.rank) == (("a:1", "b:1", "[fd00::1]:1"), 2)
    assert read_tf_config({"TF_CONFIG": read.text()}) == read


def test_arguments_replace_the_task() -> None:
    environ = config({"worker": ["a:1"], "ps": ["b:1"]}, {})
    assert read_tf_config(environ, "ps", 0) == TFConfig({"worker": ("a:1",), "ps": ("b:1",)}, "ps", 0)


@pytest.mark.parametrize(
    ("role", "index", "rank"), [("chief", 0, 0), ("worker", 1, 2), ("ps", 0, None), ("evaluator", 3, None)]
)
def test_ranks(role: str, index: int, rank: int | None) -> None:
    assert TFConfig.of({"ps": ["p:1"], "worker": ["a:1", "a:2"], "chief": ["a:3"]}, role, index).rank == rank


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, config({})])
def test_no_cluster(environ: dict[str, str]) -> None:
    assert read_tf_config(environ) is None


ONE = {"worker": ["a:1"]}
MALFORMED = {
    "not JSON": ({"TF_CONFIG": "{'cluster': {}}"}, "It is not JSON (Expecting property name"),
    "not an object": ({"TF_CONFIG": "[]"}, 'It has no "cluster": add one with the addresses'),
    "no cluster": ({"TF_CONFIG": "{}"}, 'It has no "cluster": add one with the addresses'),
    "a cluster that is not an object": (config(["a:1"]), "The cluster is ['a:1'], not an object"),
    "addresses that are not a list": (config({"worker": "a:1"}), "cluster['worker'] is 'a:1', not a list of addresses"),
    "an unknown role": (
        config({"workers": ["a:1"]}),
        "'workers': expected chief, worker, ps, evaluator",
    ),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": ONE})}, 'add a "task" with a "type" and an "index"'),
    "a task without an index": (config(ONE, {"type": "worker"}), 'add a "task" with a "type" and an "index"'),
    "a task that is not an object": (config(ONE, "worker"), "\"task\" is 'worker', not an object"),
    "a task with an unknown role": (config(ONE, {"type": "boss", "index": 0}), "to be a 'boss': expected one of"),
    "an index that is not a number": (config(ONE, {"type": "worker", "index": "x"}), "worker 'x': its index must be"),
    "an index below 0": (config(ONE, {"type": "worker", "index": -1}), "worker -1: its index must be"),
    "an index out of range": (
        config({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 2}),
        "to be worker 2, but of these the cluster has 2: worker 0 … 1. Add the task's address",
    ),
    "a second task of a role with one": (config(ONE, {"type": "worker", "index": 1}), "the cluster has worker 0 only"),
    "a role that the cluster does not have": (
        config(ONE, {"type": "ps", "index": 0}),
        "to be ps 0, but of these the cluster has none",
    ),
    "no port": (config({"worker": ["a:1", "b"]}), "Of worker 1, 'b' is no address: expected host:port"),
    "an invalid port": (config({"worker": ["a:0"]}), "'a:0' is no address"),
    "a port of 5000 digits": (config({"worker": ["a:" + "9" * 5000]}), "99' is no address"),
    "no host": (config({"worker": [":1"]}), "':1' is no address"),
    "IPv6 without brackets": (config({"worker": ["fd00::1:1"]}), "'fd00::1:1' is no address"),
    "two chiefs": (
        config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}),
        "2 chiefs (a:1, b:1): make all but one workers",
    ),
    "chief and master": (config({"chief": ["a:1"], "master": ["b:1"], "worker": ["c:1"]}), "2 chiefs"),
    "one address twice": (
        config({"worker": ["a:1"], "ps": ["a:1"]}),
        "worker 0 and ps 0 have the same address, 'a:1': give each task another port",
    ),
}


@pytest.mark.parametrize(("environ", "fragment"), MALFORMED.values(), ids=MALFORMED)
def test_malformed(environ: dict[str, str], fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_tf_config(environ)
    text = str(raised.value)
    assert text.startswith("TF_CONFIG cannot be used. ")
    assert fragment in text
    assert 'Expected JSON like {"cluster": {"worker": ["host1:2222"' in text
    assert text.endswith(f"got {environ['TF_CONFIG']!r}.")
