"""What the arguments of ``choros.spark`` mean, without a Spark."""

from __future__ import annotations

import os

import pytest

from choros.launch.bootstrap import pack
from choros.launch.plan.arguments import Arguments
from choros.spark import plan
from choros.spark.host import _visible_to
from choros.spark.plan import Machine, machines_of
from choros.spark.rows import Store
from choros.spark.run import arguments_of
from choros.transport.address import this_host


def test_arguments_of_choros_run_are_kept(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    own = {"mpi_args": "--tag-output", "network_interfaces": "lo", "commit_dir": "commits", "env": {"A": "b"}}
    given, sentences = arguments_of(2, **own)
    assert (given.mpi_args, given.network_interfaces, given.env) == ("--tag-output", "lo", {"A": "b"})
    assert given.commit_dir == os.path.join(tmp_path, "commits")  # the driver's, whatever directory executors have
    given, _ = arguments_of(2, extra_mpi_args="--quiet", verbose=2, nics=["eth1", "eth0"], **own)
    assert (given.mpi_args, given.network_interfaces, given.verbose) == ("--quiet", ["eth0", "eth1"], True)
    assert sentences == []


def test_a_store_is_a_directory_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Store.create("work/").prefix_path == os.path.join(tmp_path, "work")
    assert Store.create("s3a://bucket/work/").prefix_path == "s3a://bucket/work"
    assert Store.create("dbfs:/ml/work/").prefix_path == "/dbfs/ml/work"  # where Databricks mounts it
    assert Store.create("hdfs:/work").prefix_path == "hdfs:/work"


@pytest.mark.parametrize(("env", "seen"), [({}, "2,0"), ({"CUDA_VISIBLE_DEVICES": ""}, "")])
def test_ranks_see_the_gpus_of_their_machine_unless_the_user_says_which(env, seen, monkeypatch):
    monkeypatch.setattr(plan, "_own", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES", "as of the executor"))
    machines = machines_of([Machine(this_host(), "10.0.0.1", "/tmp/x", [int(gpu)], [[gpu]]) for gpu in "20"])
    plan.run_packed(pack(dict), _visible_to(Arguments(env=env), machines))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
