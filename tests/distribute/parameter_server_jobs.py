"""Starts the processes of parameter-server jobs directly, each with its ``TF_CONFIG``; gate files delay workers.

One process imports the framework, and all others are forked from it, so that they need not import it again.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranks.environment import QUICK, python_path
from ranks.job import free_port

TESTS = Path(__file__).parents[1]
#: The prefix of the lines in which the chief reports the results of cases.
CASE = "case: "
#: A gate: the file that a process waits for before it starts; formatted with script, role, and index and life.
GATE = "{}.go.{}.{}"


@dataclass(frozen=True)
class Job:
    """A parameter-server job.

    Attributes:
        script: the script that every process runs, in this directory.
        workers: the number of workers; if there are several, the last one waits until the chief opens its gate.
        servers: the number of parameter servers.
        lives: how many times the last worker is started; each restarted one waits at its own gate.
        evaluator: whether the job has an evaluator.
    """

    script: str
    workers: int = 1
    servers: int = 1
    lives: int = 1
    evaluator: bool = False

    def processes(self) -> Iterator[tuple[str, str, int, int]]:
        """Yields the name, role, index and life of each process."""
        tasks = {"ps": self.servers, "worker": self.workers, "evaluator": int(self.evaluator), "chief": 1}
        for role, count in tasks.items():
            for index in range(count):
                yield f"{role} {index}", role, index, 1
        for life in range(2, self.lives + 1):
            yield f"worker {self.workers - 1} again", "worker", self.workers - 1, life


@dataclass(frozen=True)
class Outcome:
    """The outcome of jobs.

    Attributes:
        errors: the traceback of each case, empty if it passed.
        codes: by script, the exit code of each process, negative if a signal ended it; ``None`` if it did not end.
        stderr: by script, the standard error of each process.
    """

    errors: Mapping[str, str]
    codes: Mapping[str, Mapping[str, int | None]]
    stderr: Mapping[str, Mapping[str, str]]


@functools.cache
def run_jobs(framework: str, *jobs: Job) -> Outcome:
    """Runs jobs one after the other in one directory that contains the digits data set.

    Args:
        framework: Keras' backend.
        jobs: the jobs, each with a different script.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        digits = np.load(TESTS.parent / "examples" / "digits.npz")
        np.save(directory / "x.npy", (digits["images"].reshape(-1, 64) / 16).astype("float32"))
        np.save(directory / "y.npy", digits["labels"].astype("int32"))
        environ = {
            **os.environ,
            **QUICK,
            "KERAS_BACKEND": framework,
            "XDG_CACHE_HOME": name,
            "CHOROS_START_TIMEOUT": "60",
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, json.dumps([asdict(job) for job in jobs])]
        starter = subprocess.Popen(
            command, env=environ, cwd=directory, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        errors: dict[str, str] = {}
        with ExitStack() as stack:
            stack.callback(starter.wait)
            stack.callback(_kill_group, starter.pid)
            stack.enter_context(starter.stdout)
            for line in starter.stdout:
                print(line, end="")
                if line.startswith(CASE):
                    case, _ = json.JSONDecoder().raw_decode(line.removeprefix(CASE))
                    errors.update(case)
        codes = {job.script: _read(directory / f"{job.script}.codes") for job in jobs}
        stderr = {
            job.script: {name: (directory / f"{job.script}.{name}.stderr").read_text() for name in codes[job.script]}
            for job in jobs
        }
        return Outcome(errors, codes, stderr)


def _read(path: Path) -> dict[str, int | None]:
    return json.loads(path.read_text()) if path.exists() else {}


def _kill_group(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


def _start(jobs: Sequence[Job]) -> None:
    """Runs in the starter process; in the forked processes it returns when their script has ended."""
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        sys.modules["tensorflow"] = None  # Keras would search for it in each process, which takes seconds.
    warnings.filterwarnings("ignore", "os.fork")  # JAX warns although it has not been used yet.
    for module in ("pytest", "keras", "choros.parameter_server.training"):
        importlib.import_module(module)
    gc.freeze()  # Otherwise each fork copies all of these modules when it ends.
    for job in jobs:
        cluster = _cluster(job)
        pids: dict[int, str] = {}
        for name, role, index, life in job.processes():
            pid = os.fork()
            if pid == 0:
                os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
                _run_process(job, name, role, index, life)
                return
            pids[pid] = name
            Path(f"{job.script}.{name}.pid").write_text(str(pid))
        _wait(job, pids)


def _run_process(job: Job, name: str, role: str, index: int, life: int) -> None:
    os.environ["TEST_LIFE"] = str(life)
    for descriptor, path in ((1, os.devnull), (2, f"{job.script}.{name}.stderr")):
        if role != "chief" or descriptor == 2:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    gate = Path(GATE.format(job.script, role, f"{index}.{life}"))
    waits = role == "worker" and (life > 1 or index == job.workers - 1 > 0)
    while waits and not gate.exists():
        time.sleep(0.02)
    runpy.run_path(str(TESTS / "distribute" / f"{job.script}.py"), run_name="__main__")


def _wait(job: Job, pids: dict[int, str]) -> None:
    """Waits until all processes have ended, but at most 30 seconds longer than the chief."""
    codes: dict[str, int | None] = dict.fromkeys(pids.values())
    deadline = float("inf")
    while pids and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[name := pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            if name == "chief 0":
                deadline = time.monotonic() + 30
        else:
            time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    Path(f"{job.script}.codes").write_text(json.dumps(codes))


def _cluster(job: Job) -> dict[str, Any]:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(job.workers + job.servers)]
    # Nothing listens at the chief's address.
    return {"chief": ["127.0.0.1:1"], "worker": addresses[: job.workers], "ps": addresses[job.workers :]}


if __name__ == "__main__":
    _start([Job(**job) for job in json.loads(sys.argv[1])])
