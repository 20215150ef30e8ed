"""Starts the processes of a ParameterServer job by hand, each with its ``TF_CONFIG``, with files to wait for."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TESTS = Path(__file__).parents[1]
#: Begins the lines of the chief that tell how a case went.
CASE = "case: "
#: A process waits for this file before it does anything; by directory, role, and index and life.
GATE = "{}/go.{}.{}"


@dataclass(frozen=True)
class Outcome:
    """How a job went.

    Attributes:
        errors: the traceback of each case, empty if it went well.
        codes: the exit code of each process, ``None`` if it had to be stopped.
        said: what each process wrote to standard error.
    """

    errors: Mapping[str, str]
    codes: Mapping[str, int | None]
    said: Mapping[str, str]


class Job:
    """The processes of a job, in a directory that has their pids and the digits."""

    def __init__(self, script: str, framework: str, workers: int, servers: int, directory: Path) -> None:
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(1 + servers)]
        listening = [f"127.0.0.1:{number}" for number in range(1, workers + 1)]  # Nobody listens there.
        self._cluster = {"chief": addresses[:1], "worker": listening, "ps": addresses[1:]}
        self._script = TESTS / "distribute" / script
        self._framework = framework
        self._directory = directory
        self.processes: dict[str, subprocess.Popen[str]] = {}
        x, y = load_digits(return_X_y=True)
        np.save(directory / "x.npy", (x / 16).astype("float32"))
        np.save(directory / "y.npy", y.astype("int32"))

    def start(self, role: str, index: int, life: int = 1, *, waits: bool = False) -> subprocess.Popen[str]:
        """A process; the next ``life`` of it, if it waits until the one before is over."""
        if not waits:
            Path(GATE.format(self._directory, role, f"{index}.{life}")).touch()
        environ = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": self._cluster, "task": {"type": role, "index": index}}),
            "KERAS_BACKEND": self._framework,
            "XDG_CACHE_HOME": str(self._directory),
            "CHOROS_START_TIMEOUT": "60",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(TESTS),
            "OMP_NUM_THREADS": "1",
            "TEST_DIRECTORY": str(self._directory),
            "TEST_LIFE": str(life),
        }
        name = f"{role} {index}" if life == 1 else f"{role} {index} again"
        command = [sys.executable, str(self._script)]
        pipe = subprocess.PIPE if role == "chief" else subprocess.DEVNULL
        with (self._directory / f"{name}.stderr").open("w") as errors:
            process = subprocess.Popen(command, env=environ, cwd=self._directory, stdout=pipe, stderr=errors, text=True)
        self.processes[name] = process
        (self._directory / f"{name}.pid").write_text(str(process.pid))
        return process

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@functools.cache
def run_job(script: str, framework: str, workers: int, servers: int, *, late: bool = False) -> Outcome:
    """Runs a job.

    Args:
        script: what every process runs, beside this file.
        framework: Keras' backend.
        workers: of the cluster.
        servers: of the cluster.
        late: the last one waits until the chief opens its gate, and there is another life of it that waits likewise.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        job = Job(script, framework, workers, servers, directory)
        stack.callback(job.stop)
        chief = job.start("chief", 0)
        for index in range(servers):
            job.start("ps", index)
        for index in range(workers):
            job.start("worker", index, waits=late and index == workers - 1)
        if late:
            job.start("worker", workers - 1, life=2, waits=True)
        errors: dict[str, str] = {}
        with chief.stdout:
            for line in chief.stdout:
                print(line, end="")
                if line.startswith(CASE):
                    case, _ = json.JSONDecoder().raw_decode(line.removeprefix(CASE))
                    errors.update(case)
        codes = {name: _ended(process) for name, process in job.processes.items()}
        said = {name: (directory / f"{name}.stderr").read_text() for name in job.processes}
        return Outcome(errors, codes, said)


def _ended(process: subprocess.Popen[str]) -> int | None:
    try:
        return process.wait(30)
    except subprocess.TimeoutExpired:
        return None


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
