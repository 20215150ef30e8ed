"""chorosrun as a process, for tests: starts it, signals it, and checks what it leaves."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launch.users import OTHER
from warm.servers import warm_python

CHOROSRUN = (sys.executable, "-P", "-m", "choros.launch.cli")
#: A variable in the environment of every test job, which identifies its processes.
TAG = "CHOROS_TEST_TAG"
TESTS = Path(__file__).parent.parent
#: What jobs of each framework do not find: Keras would import it, in seconds.
HIDDEN = {"torch": ("jax", "tensorflow"), "tensorflow": ("jax",), "jax": ("tensorflow",)}
#: What chorosrun shows if the start takes long, as on a busy machine.
SLOW_START = re.compile(r"^chorosrun: (starting \d+ \w+|checking \d+ remote hosts?) …\n", re.MULTILINE)


@dataclass
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def reports(self):
        """What ranks have printed as JSON, in the order of the launcher's numbers, or of the ranks, if it has these."""
        found = [json.loads(each) for each in re.findall(r"{.*}", self.out)]
        return sorted(found, key=lambda report: report.get("number", report.get("rank", 0)))


class Running:
    """A running chorosrun, with a unique tag.

    With ``warm``, processes that have imported the framework become its ranks, instead of new ones: see
    ``warm/client.py``. ``only_backend``: they do not find the frameworks that Keras would import beside its backend.
    """

    def __init__(self, *arguments, env=None, cwd=None, start=CHOROSRUN, warm=False, only_backend=True):
        self.tag = f"{os.getpid()}-{time.monotonic_ns()}"
        environ = {**os.environ, **(env or {}), TAG: self.tag}
        hidden = HIDDEN.get(environ.get("KERAS_BACKEND", ""), ()) if only_backend else ()
        hidden = [str(TESTS / f"hidden_{name}") for name in hidden]
        environ["PYTHONPATH"] = os.pathsep.join([*hidden, *filter(None, [environ.get("PYTHONPATH")])])
        if warm:
            python = warm_python(environ["KERAS_BACKEND"])
            at = arguments.index(sys.executable)
            arguments = (*arguments[:at], *python, *arguments[at + 1 :])
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*start, *map(str, arguments)],
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )
        self._read = b""

    @property
    def output(self):
        """What has been read of standard output."""
        return self._read.decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n")

    def wait_for(self, count, word, seconds=180):
        """Reads standard output until its lines contain ``word`` ``count`` times; ranks print ``ready`` this way."""
        end = time.monotonic() + seconds
        while self.output.rpartition("\n")[0].count(word) < count:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {word} in:\n{self.output}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)  # communicate() loses what readline() reads ahead
            assert data, f"ended before {word}:\n{self.output}\n{self.process.stderr.read()}"
            self._read += data

    def signal(self, number):
        self.process.send_signal(number)

    def end(self, seconds=180):
        """Waits for its end; of a job that goes on for longer, the test says what it has printed and what ranks do."""
        began = time.monotonic()
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            stacks = self._stacks()
            self.process.kill()
            out, err = self.process.communicate()
            pytest.fail(f"the job had not ended after {seconds} s:\n{self.output}{out}\n{err}\n{stacks}")
        err = SLOW_START.sub("", err)
        return Ended(self.process.returncode, self.output + out, err, time.monotonic() - began)

    def _stacks(self):
        command = (sys.executable, "-P", "-m", "choros", "stacks", self.process.pid)
        try:
            ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return "choros stacks did not answer"
        return ended.stdout + ended.stderr

    def processes(self):
        """All processes that carry the job's tag, but not chorosrun."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get(TAG) == self.tag and process.pid != self.process.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def daemons(self):
        """The directories of mpirun's daemons, which are named after their processes."""
        named = (Path(f"/tmp/prted.{process.pid}") for process in self.processes())
        return [directory for directory in named if directory.exists()]

    def assert_nothing_runs(self, seconds=30):
        """Checks that no process of the job runs after ``seconds``."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, [process.cmdline() for process in left]

    def assert_nothing_left(self, seconds=30):
        """Checks that no process and no directory of the job exists after ``seconds``."""
        end = time.monotonic() + seconds
        self.assert_nothing_runs(seconds)
        while (left := self.directories()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left

    def directories(self):
        """The directories of the job, if its ranks have printed its name: ``job=NAME``."""
        names = {word.removeprefix("job=") for word in self.output.split() if word.startswith("job=")}
        paths = [Path("/dev/shm") / f"choros-job-{name}" for name in names]
        paths += [Path("/tmp") / f"choros-session-{name}" for name in names]
        # Another test's user makes directories of these names for all jobs that there are.
        return [path for path in paths if path.exists() and path.lstat().st_uid != OTHER]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [self.process, *self.processes()]:
            with contextlib.suppress(psutil.Error, OSError):
                process.send_signal(signal.SIGKILL)
        self.process.communicate()


def run(*arguments, seconds=180, **how):
    """Runs chorosrun to its end and checks that nothing is left."""
    with Running(*arguments, **how) as job:
        ended = job.end(seconds)
        job.assert_nothing_left()
    return ended


def rank_script(path, body):
    """A Python script for ranks, with the variable ``rank`` and the function ``ready``, which prints ``ready``."""
    head = (
        "import os, signal, subprocess, sys, time\n"
        "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "def ready():\n"
        "    print('ready', 'job=' + os.environ['CHOROS_JOB'], flush=True)\n"
    )
    path.write_text(head + body)
    return path
