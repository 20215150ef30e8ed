"""Jobs with parameter servers, of real processes that only have a role."""

import os
import re
import signal
import sys

import pytest

from launch.launched import Running, run

pytestmark = pytest.mark.slow

PYTHON = sys.executable
HEAD = """
import hashlib, json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role = config["task"]["type"]
done = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
def ready():
    secret = hashlib.sha256(bytes.fromhex(os.environ["CHOROS_SECRET"])).hexdigest()
    print("ready", os.getpid(), "job=" + os.environ["CHOROS_JOB"], secret, sorted(config["cluster"]), flush=True)
def wait():
    while not (done and done.exists()):
        time.sleep(0.02)
"""


def script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text(HEAD + body)
    return path


def ready(job, label):
    """The process ID and the rest of the line of the last ``ready`` with this label."""
    return re.findall(rf"\[{label}\] ready (\d+) \S+ (.*)", job.output)[-1]


def test_a_worker_that_is_killed_is_restarted(tmp_path):
    """All output of a job that succeeds, in one job."""
    done, logs = tmp_path / "done", tmp_path / "logs"
    arguments = ("--ps", "1", "-np", "2", "--output-dir", logs, PYTHON, script(tmp_path, "ready(); wait()"), done)
    with Running(*arguments, env={"TF_CONFIG": "stale", "OMPI_COMM_WORLD_RANK": "7"}) as job:
        job.wait_for(4, "ready")
        lines = {ready(job, label)[1] for label in ("chief", "ps 0", "worker 0", "worker 1")}
        assert len(lines) == 1  # one secret, one cluster
        assert lines.pop().endswith("['chief', 'ps', 'worker']")
        secrets = {
            process.environ()["CHOROS_SECRET"] for process in job.processes() if "script.py" in str(process.cmdline())
        }
        assert len(secrets) == 1
        assert not [text for process in job.processes() for text in process.cmdline() if text in secrets]
        pid, _ = ready(job, "worker 0")
        os.kill(int(pid), signal.SIGKILL)
        job.wait_for(5, "ready")
        assert ready(job, "worker 0")[0] != pid
        done.touch()
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 0
    assert re.fullmatch(
        r"chorosrun: worker 0 on \S+ was killed by SIGKILL \(signal 9\) and was restarted \(restart 1\)\.\n",
        ended.err,
    )
    assert (logs / "worker.0" / "stdout").read_text().count("ready") == 2
    assert sorted(path.name for path in logs.iterdir()) == ["chief", "ps.0", "worker.0", "worker.1"]


def test_a_ps_that_is_killed_ends_the_job(tmp_path):
    with Running("--ps", "1", "-np", "1", PYTHON, script(tmp_path, "ready(); wait()")) as job:
        job.wait_for(3, "ready")
        os.kill(int(ready(job, "ps 0")[0]), signal.SIGKILL)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 137
    first, second = ended.err.splitlines()
    assert re.match(r"chorosrun: ps 0 on \S+ was killed by SIGKILL .*; the other 2 processes were stopped\.", first)
    assert second.endswith("start the job again from the last checkpoint.")


def test_the_job_ends_with_the_chief(tmp_path):
    """The others have the grace period and are then stopped; those that end with 0 within it are not mentioned."""
    body = "if role == 'chief': sys.exit(0)\nif role == 'ps': time.sleep(0.5); sys.exit(0)\nready(); wait()\n"
    ended = run("--ps", "1", "-np", "1", "--grace-period", "5", PYTHON, script(tmp_path, body))
    assert ended.code == 0
    assert ended.err == "chorosrun: worker 0 did not end within 5 s after the chief and was stopped.\n"


@pytest.mark.parametrize(
    ("failing_role", "end", "code", "message"),
    [
        ("chief", "sys.exit(3)", 3, r"the chief on \S+ failed with exit code 3; the other 2 processes were stopped\."),
        ("worker", "1 / 0", 1, r"worker 0 on \S+ failed with exit code 1 \(ZeroDivisionError\); the other 2 processes"),
        ("worker", "os.kill(os.getpid(), 11)", 139, r"restart 1\)[^$]*SIGSEGV[^$]*this was restart 1"),
    ],
)
def test_failures(tmp_path, failing_role, end, code, message):
    body = f"if role == {failing_role!r}: {end}\nwait()\n"
    ended = run("--ps", "1", "-np", "1", "--max-restarts", "1", PYTHON, script(tmp_path, body))
    assert ended.code == code
    assert re.search(f"chorosrun: .*{message}", ended.err), ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-restarts", "1", "-np", "2", "python"), "--max-restarts applies only to the workers"),
        (("--ps", "2", "-H", "localhost:3", "python"), "a job needs a chief, 2 ps and at least one worker"),
        (("--ps", "0", "python"), "--ps 0: expected a whole number from 1 to"),
    ],
)
def test_invalid_arguments(arguments, message):
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
