"""Clusters that start the same command on each host, without ssh: pods of an Indexed Job, which stand for all."""

import json
import re
import sys

import pytest

from launch.launched import rank_script
from launch.pods import SECRET, several_pods

pytestmark = pytest.mark.slow

PYTHON = sys.executable
#: A loop of 40 steps of 0.1 s, whose weight is the number of steps.
TRAINS = """
import numpy, choros
from choros.comm import Reduction, global_process_set
from choros.elastic.retry import run
from choros.elastic.state import ObjectState
choros.init()
communicator = global_process_set.communicator
@run
def train(state):
    while state.step < 40:
        state.weight += float(communicator.allreduce(numpy.ones(()), Reduction.SUM, name='sum')) / communicator.size
        state.step += 1
        print('step', state.step, 'of', communicator.size, flush=True)
        time.sleep(0.1)
        state.commit()
state = ObjectState(step=0, weight=0.0)
train(state)
print('weight', state.weight, communicator.size)
"""
ELASTIC = ("-np", 3, "--min-np", 2)


@pytest.fixture
def pods(tmp_path, request):
    with several_pods(tmp_path, 3, **getattr(request, "param", {})) as pods:
        yield pods


@pytest.fixture
def trains(tmp_path):
    return rank_script(tmp_path / "trains.py", TRAINS)


def weights(pods):
    return re.findall(r"weight (\S+) (\d)", pods.log(0))


def test_pods_are_hosts_of_one_job_and_end_with_its_code(pods, tmp_path):
    script = rank_script(
        tmp_path / "s.py",
        "import sys, choros\n"
        "choros.init()\n"
        "print('rank', choros.rank(), choros.size(), choros.local_rank(), os.uname().nodename)\n"
        "sys.exit(7 if rank == 2 else 0)\n",
    )
    pods.start_all("-np", 3, PYTHON, script)
    assert pods.codes() == [7, 7, 7], pods.logs()
    assert sorted(re.findall(r"rank (\d 3 .*)", pods.log(0))) == ["0 3 0 train-0", "1 3 0 train-1", "2 3 0 train-2"]
    assert "rank 2 on train-2 failed with exit code 7" in pods.log(0)
    assert "this host runs ranks for chorosrun on train-0.train.ns" in pods.log(1)
    assert SECRET not in pods.log(0) + pods.log(1) + pods.log(2)


def test_a_pod_with_another_key_is_no_host(pods):
    flags = ("-np", 2, "--start-timeout", 6)
    pods.start(0, *flags, "true")
    pods.start(1, *flags, "true", secret="11" * 16)
    assert pods.codes()[0] == 68, pods.logs()
    assert "hosts for 1 of 2 ranks of an Indexed Job did not come within 6 s" in pods.log(0)
    assert "CHOROS_SECRET must be the same in all processes of the job" in pods.log(0) + pods.log(1)


def test_the_first_pod_is_waited_for(pods):
    pods.start(1, "-np", 2, "true")
    pods.until(lambda: "waiting for chorosrun on train-0.train.ns:29519" in pods.log(1))
    pods.start(0, "-np", 2, "true")
    assert pods.codes() == [0, 0], pods.logs()


@pytest.mark.parametrize("pods", [{}, {"only_ipv6": True}], indirect=True, ids=["IPv4", "IPv6"])
def test_a_pod_that_is_killed_comes_back(pods, tmp_path):
    loop = "    while state.step < 40:\n"
    assert loop in TRAINS
    # The last step waits for the pod.
    waits = "        if state.step == 39 and communicator.size < 3: time.sleep(0.1); state.commit(); continue\n"
    trains = rank_script(tmp_path / "trains.py", TRAINS.replace(loop, loop + waits))
    flags = (*ELASTIC, "--commit-dir", tmp_path / "commits")
    pods.start_all(*flags, PYTHON, trains)
    pods.until(lambda: "step 5 of 3" in pods.log(0))
    pods.kill(2)
    pods.until(lambda: re.search(r"step \d+ of 2", pods.log(0)))
    pods.start(2, *flags, PYTHON, trains)
    assert pods.codes() == [0, 0, 0], pods.logs()
    assert weights(pods) == [("40.0", "3")] * 3


def test_a_pod_that_is_deleted_leaves_in_order(pods, trains, tmp_path):
    pods.start_all(*ELASTIC, "--commit-dir", tmp_path / "commits", PYTHON, trains)
    pods.until(lambda: "step 5 of 3" in pods.log(0))
    pods.end(2)
    assert pods.codes() == [0, 0, 143], pods.logs()
    assert weights(pods) == [("40.0", "2")] * 2


@pytest.mark.parametrize("how", ["kill", "end"])
def test_all_start_again_after_the_first_pod(pods, trains, tmp_path, how):
    command = (*ELASTIC, "--commit-dir", tmp_path / "commits", PYTHON, trains)
    pods.start_all(*command)
    pods.until(lambda: "step 5 of 3" in pods.log(0))
    getattr(pods, how)(0)
    assert pods.codes()[1:] == ([69, 69] if how == "kill" else [75, 75]), pods.logs()
    pods.start_all(*command)
    assert pods.codes() == [0, 0, 0], pods.logs()
    assert weights(pods) == [("40.0", "3")] * 3


def skypilot(addresses):
    return lambda index: {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NODE_RANK": str(index)}


def vertex(addresses):
    pools = {"workerpool0": [f"{addresses[0]}:2222"], "workerpool1": [f"{each}:2222" for each in addresses[1:]]}

    def environ(index):
        task = {"type": "workerpool0" if index == 0 else "workerpool1", "index": max(0, index - 1)}
        names = {"chief": pools["workerpool0"], "worker": pools["workerpool1"]}
        role = {"type": "chief" if index == 0 else "worker", "index": task["index"]}
        return {
            "CLUSTER_SPEC": json.dumps({"cluster": pools, "task": task}),
            "TF_CONFIG": json.dumps({"cluster": names, "task": role}),
        }

    return environ


@pytest.mark.parametrize("cluster", [skypilot, vertex])
def test_clouds_need_no_flags(pods, tmp_path, cluster):
    pods.environ = cluster(pods.addresses)
    script = rank_script(tmp_path / "s.py", "import choros\nchoros.init()\nprint('size', choros.size())")
    pods.start_all(PYTHON, script)
    assert pods.codes() == [0, 0, 0], pods.logs()
    assert pods.log(0).count("size 3") == 3
