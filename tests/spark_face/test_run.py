"""``choros.spark.run``: a function on ranks that a barrier stage places."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import choros.spark
from choros.errors import ConfigError, LaunchError, WorkerFailed
from harness import TESTS
from spark_face.training import TORCH, describe, fail_on, fit

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def test_results_in_rank_order_and_output_on_the_driver(spark, capsys):
    env = {"CHOROS_TEST_VALUE": "x"}
    found = choros.spark.run(describe, (1, "a"), {"key": b"b"}, num_proc=2, env=env)
    assert found == [((1, "a"), {"key": b"b"}, rank, [0, 1], "x") for rank in (0, 1)]
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert "warned 0" in shown.err
    assert "warned 1" in shown.err
    assert spark.ranks() == []


def test_streams_and_default_size(spark):
    out, err = io.StringIO(), io.StringIO()
    cell = {}
    exec("def add(n):\n    import choros\n    choros.init()\n    print('n', n)\n    return choros.size() + n", cell)
    assert choros.spark.run(cell["add"], (10,), stdout=out, stderr=err) == [12, 12]
    assert sorted(out.getvalue().splitlines()) == ["[0] n 10", "[1] n 10"]


def test_the_traceback_of_a_rank_is_raised(spark):
    with pytest.raises(WorkerFailed) as raised:
        choros.spark.run(fail_on, (1,), num_proc=2)
    assert (raised.value.rank, raised.value.exit_code) == (1, 1)
    assert raised.value.traceback.startswith("Traceback (most recent call last):\n")
    assert raised.value.traceback.endswith("KeyError: 'on purpose'")
    assert "choros/spark" not in raised.value.traceback
    assert "java" not in str(raised.value)
    assert spark.ranks() == []


def test_too_few_slots(spark):
    with pytest.raises(LaunchError, match=r"^Timed out waiting for Spark tasks to start\..*Spark has 2 slots"):
        choros.spark.run(describe, num_proc=3, start_timeout=1)


def test_slots_that_another_job_has(spark, tmp_path):
    started, end = tmp_path / "started", tmp_path / "end"

    def wait(rows):
        Path(f"{started}-{next(rows)}").touch()
        while not end.exists():
            time.sleep(0.05)
        return rows

    other = threading.Thread(target=lambda: spark.context.parallelize([0, 1], 2).mapPartitions(wait).count())
    other.start()
    while len([*tmp_path.iterdir()]) < 2:
        time.sleep(0.05)
    with pytest.raises(LaunchError, match=r"^Timed out waiting for Spark tasks to start\..*other jobs have them"):
        choros.spark.run(describe, num_proc=2, start_timeout=2)
    end.touch()
    other.join()


@pytest.mark.parametrize(
    ("given", "error"),
    [({"num_proc": 0}, ConfigError), ({"num_proc": 2, "no_such": 1}, TypeError), ({"fn": "train.py"}, ConfigError)],
)
def test_wrong_arguments(spark, given, error):
    with pytest.raises(error):
        choros.spark.run(**{"fn": describe, **given})


def undisturbed():
    return choros.spark.run(fit, num_proc=2, env=TORCH)


@pytest.mark.parametrize(
    "which", ["the one that starts the ranks", pytest.param("the other", marks=pytest.mark.nightly)]
)
def test_an_executor_that_is_killed(spark, tmp_path, which):
    """The stage is tried again, and training goes on from the last commit, to the same weights."""
    expected = undisturbed()
    progress = tmp_path / "progress"
    killed = []

    def kill():
        while not progress.exists() or len(progress.read_text().splitlines()) < 12:
            time.sleep(0.05)
        starting = spark.starting_executor()
        chosen = [
            each for each in spark.executors() if (each == starting) == (which == "the one that starts the ranks")
        ]
        chosen[0].kill()
        killed.append(len(progress.read_text().splitlines()))

    thread = threading.Thread(target=kill)
    thread.start()
    commits = str(tmp_path / "commits")
    shown = io.StringIO()
    found = choros.spark.run_elastic(
        fit, (str(progress), 0.1), num_proc=2, env=TORCH, commit_dir=commits, commit_steps=1, stderr=shown
    )
    thread.join()
    assert killed
    assert "Spark has lost a task of the barrier stage" in shown.getvalue()
    assert "It is tried again: attempt 2 of 4." in shown.getvalue()
    for (weights, steps), (others, _) in zip(found, expected, strict=True):
        assert steps <= 40 - 5  # of 40: those that were committed are not made again
        for own, other in zip(weights, others, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-6)
    assert spark.ranks() == []


@pytest.mark.timeout(300)
def test_machines_without_ssh(tmp_path):
    """Two machines, each with a worker of Spark's; an executor that is killed on the second one."""
    script = TESTS / "spark_face" / "machines_script.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=280)
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    machines = ["machine-0", "machine-1"]
    assert [each[:4] for each in found["where"]] == [[0, 2, 1, 2], [1, 2, 1, 2]]
    assert sorted(found["where"][0][4]) == machines
    assert [total for total, _ in found["rows"]] == [4950.0] * 2
    assert len({file for _, file in found["rows"]}) == 2  # in the executor's directory of each machine
    assert found["kept"] == []
    assert found["difference"] < 1e-6, found
    assert found["steps"] <= 35, found
    assert found["left"] == 0


def test_distributors(spark, tmp_path, capsys):
    distributor = choros.spark.Distributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(describe, 1, key=2)[:4] == ((1,), {"key": 2}, 0, [0, 1])
    here = choros.spark.Distributor(num_processes=2, local_mode=True, use_gpu=False)
    assert here.run(describe)[3] == [0, 1]
    file = tmp_path / "train.py"
    file.write_text("import sys, choros\nchoros.init()\nprint(sys.argv[1:], __name__, choros.size())\nsys.exit(0)\n")
    capsys.readouterr()
    assert distributor.run(str(file), "--epochs", 3) is None
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{k}] ['--epochs', '3'] __main__ 2" for k in (0, 1)]
    with pytest.raises(ConfigError):
        choros.spark.Distributor(num_processes=0)


def test_an_elastic_job_goes_on_without_a_rank(spark):
    arguments = {"num_proc": 2, "min_num_proc": 1, "reset_limit": 0, "chaos": "kill:rank=1@step=5", "env": TORCH}
    ((weights, steps),) = choros.spark.run_elastic(fit, **arguments, stderr=io.StringIO())
    assert steps >= 40
    assert np.isfinite(weights[0]).all()
    assert spark.ranks() == []
