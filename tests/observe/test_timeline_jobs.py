"""Timelines of jobs: however ranks are started, and however they end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from choros.observe.timeline import parts_directory
from choros.trace.cli import rank_times, waits_of
from choros.trace.files import merge_parts
from comm.starts import by_hand, together
from harness import Job, check_case, needs, on
from launch.launched import Running, rank_script, run
from launch.namespaces import several_hosts
from observe.timelines import MS, read
from warm.servers import warm_python

CASES, TRAINING = "observe.timeline_cases", "observe.timeline_training_cases"

LATE = """
import choros, numpy
choros.init()
communicator = choros.global_process_set.communicator
for step in range(5):
    if rank == 1: time.sleep(0.3)
    communicator.allreduce(numpy.ones(4, numpy.float32), name="loss")
"""


@on(Job(3), cases=CASES)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)


@on(Job(2, "torch"), cases=TRAINING)
def test_training(case: str, job: Job) -> None:
    check_case(TRAINING, case, job)


def assert_waited_for_rank_1(file: Path, ranks: int) -> None:
    trace = read(file)
    assert [each.rank for each in rank_times(trace)] == list(range(ranks))
    (waits,) = (each for each in waits_of(trace) if each.rank == 1)
    assert waits.collective == "loss"
    assert waits.median >= 40 * MS


@pytest.mark.slow
def test_chorosrun(tmp_path: Path) -> None:
    """The command says who was waited for, over a pipe."""
    script = rank_script(tmp_path / "script.py", LATE)
    file = tmp_path / "run.json"
    assert run("-np", 3, "--timeline-filename", file.name, sys.executable, script, cwd=tmp_path).code == 0
    assert_waited_for_rank_1(file, 3)
    assert not parts_directory(file).exists()
    command = [sys.executable, "-m", "choros", "timeline", str(file), "--summary"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    named = re.search(r"^rank 1 +\d+ +[\d.]+ m?s +([\d.]+) ms .* loss$", text, re.MULTILINE)
    assert named is not None, text
    assert float(named[1]) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill -9", "exception", "Ctrl-C"])
def test_a_job_that_does_not_end_in_order_leaves_a_valid_file(end: str, tmp_path: Path) -> None:
    last = {
        "kill -9": "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncommunicator.barrier(name='never')",
        "exception": "if rank == 1: raise ValueError\ncommunicator.barrier(name='never')",
        "Ctrl-C": "ready(); time.sleep(100 if rank == 1 else 0)\ncommunicator.barrier(name='never')",
    }
    script = rank_script(tmp_path / "script.py", LATE + last[end])
    file = tmp_path / "run.json"
    with Running("-np", 3, sys.executable, script, env={"CHOROS_TIMELINE": str(file)}) as job:
        if end == "Ctrl-C":
            job.wait_for(3, "ready")
            job.signal(signal.SIGINT)
        assert job.end().code != 0
        job.assert_nothing_left()
    assert_waited_for_rank_1(file, 3)
    assert sorted(tmp_path.iterdir()) == [file, tmp_path / "script.py"]


@pytest.mark.slow
@needs("torch")
@pytest.mark.parametrize("rest", ["", "\nraise KeyboardInterrupt"], ids=["in order", "Ctrl-C"])
def test_without_chorosrun(rest: str, tmp_path: Path) -> None:
    """If ranks do not end in order, each merges what it finds, and the parts stay for `choros timeline`."""
    file, script = tmp_path / "run.json", tmp_path / "script.py"
    script.write_text("import os, time\nrank = int(os.environ['RANK'])" + LATE + rest)
    environs = [{**each, "CHOROS_TIMELINE": str(file)} for each in by_hand(2)]
    for code, output in together([*warm_python("torch"), str(script)], environs):
        assert (code != 0) == bool(rest), output
    assert_waited_for_rank_1(file, 2)
    assert parts_directory(file).exists() == bool(rest)
    assert merge_parts(file) == bool(rest)
    assert_waited_for_rank_1(file, 2)


@pytest.mark.slow
def test_two_hosts_that_share_no_directory(tmp_path: Path) -> None:
    """Each rank has its part in a directory of its own; rank 0 receives that of the other through the engine."""
    script = rank_script(
        tmp_path / "script.py", "os.makedirs(f'own-{rank}'); os.chdir(f'own-{rank}')" + LATE + "choros.shutdown()"
    )
    with several_hosts(tmp_path) as network:
        hosts = f"{network.hosts[0]}:1,{network.hosts[1]}:1"
        ended = run(
            *("--ssh-command", network.reach, "-H", hosts, sys.executable, script),
            env={"CHOROS_TIMELINE": "run.json"},
            cwd=tmp_path,
        )
    assert ended.code == 0, ended.err
    assert_waited_for_rank_1(tmp_path / "own-0" / "run.json", 2)
    assert {each.host for each in read(tmp_path / "own-0" / "run.json").ranks} == {"host-1", "host-2"}
    assert not list((tmp_path / "own-1").iterdir())
