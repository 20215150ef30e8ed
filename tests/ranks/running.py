"""A job that is up: its ranks wait for cases, and tell how each went."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from ranks.job import Job, Start

TESTS = Path(__file__).parents[1]
#: Limits for what hangs, on a machine that is busy with other work too.
START_SECONDS, CASE_SECONDS, END_SECONDS = 180, 150, 60
#: So much longer than the first rank that failed may the others take: they may wait for it for ever.
GRACE_SECONDS = 10
#: A program's exit code if such ranks cannot be had here.
CANNOT = 75

#: XLA's optimizations of these small models take longer than the models.
QUICK = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
#: Cases compile the same models again and again, however little time each takes.
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
#: Where the frames of pytest begin.
PYTEST = '  File "' + str(Path(pytest.__file__).parents[1] / "_pytest")


class CannotStart(Exception):
    """Such ranks cannot be had on this machine, and why."""


class Broken(Exception):
    """A job cannot go on, and why."""


@dataclass(frozen=True)
class Report:
    """How a case went on a rank.

    Attributes:
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        text: the traceback, or the reason.
    """

    outcome: str
    text: str = ""


@dataclass(frozen=True)
class Member:
    """A rank: the process, and the way to it."""

    rank: int
    pid: int
    connection: Connection


class Running:
    """The processes of a job, from their start to their end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._directory = Path(tempfile.mkdtemp(prefix="choros-tests-"))  # for this user alone
        self._log = self._directory / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._members: list[Member] = []
        try:
            self._begin()
        except BaseException:
            self.kill()
            raise

    def _begin(self) -> None:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self._directory / "door"))
            door.listen()
            program = ("-m", "ranks.rank", str(self._directory))
            self._processes += [self._start(start) for start in self.job.launcher.starts(self.job.ranks, program)]
            connections = self._welcome(door)
        self._members += [Member(*connection.recv(), connection) for connection in connections]
        self._members.sort(key=lambda member: member.rank)

    def _start(self, start: Start) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": python_path(), "CHOROS_TEST_CACHE": caches()}
        environ = {**os.environ, **QUICK, **CACHE, **own, **self.job.environment(), **start.environ}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                start.command,
                env=environ,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _welcome(self, door: socket.socket) -> list[Connection]:
        door.settimeout(0.1)
        connections: list[Connection] = []
        end = time.monotonic() + START_SECONDS
        while len(connections) < self.job.ranks:
            codes = [process.poll() for process in self._processes]
            if CANNOT in codes:
                raise CannotStart(self._log.read_text().strip())
            if codes.count(None) < len(codes) or time.monotonic() > end:
                problem = f"ended with {codes}" if any(code is not None for code in codes) else "took too long"
                raise Broken(f"the job {problem} before its {self.job.ranks} ranks had come:\n{self._log.read_text()}")
            with suppress(TimeoutError):
                connections.append(Connection(door.accept()[0].detach()))
        return connections

    def run(self, case: str) -> dict[int, Report]:
        """How ``case``, a module and a function, goes on each rank.

        Raises:
            Broken: not all ranks came to the end of it.
        """
        begin = self._log.stat().st_size
        for member in self._members:
            with suppress(OSError):  # That it is gone is seen below.
                member.connection.send(case)
        reports: dict[int, Report] = {}
        pending = {member.connection: member for member in self._members}
        end = time.monotonic() + CASE_SECONDS
        problem = ""
        while pending and not problem:
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                problem = self._why_not_ended(list(pending.values()), reports)
            for connection in ready:
                member = pending.pop(connection)
                try:
                    report = reports[member.rank] = Report(*connection.recv())
                except (EOFError, OSError):
                    self._await_end()
                    problem = f"rank {member.rank} (process {member.pid}) has died"
                    break
                if report.outcome == "failed":
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if problem:
            said = self._log.read_bytes()[begin:].decode(errors="replace")
            raise Broken(f"{told(reports)}{problem}\n{said}")
        return reports

    def _why_not_ended(self, pending: list[Member], reports: dict[int, Report]) -> str:
        """That these ranks did not end in time, and where they are."""
        for member in pending:
            with suppress(OSError):
                os.kill(member.pid, signal.SIGUSR1)
        time.sleep(1)  # Each writes its stack.
        limit = f"{GRACE_SECONDS} s after a rank had failed" if reports else f"after {CASE_SECONDS} s"
        stacks = {member.rank: (self._directory / f"stack.{member.pid}").read_text() for member in pending}
        return "\n".join(f"rank {rank} had not ended {limit}:\n{shortened(stack)}" for rank, stack in stacks.items())

    def close(self) -> None:
        """Lets the ranks end."""
        for member in self._members:
            member.connection.close()
        self._await_end()
        self.kill()

    def kill(self) -> None:
        """Ends what is left, and removes the job's files."""
        for member in self._members:
            if any(process.poll() is None for process in self._processes):
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
            member.connection.close()
        if self._members:
            self._await_end()
        for process in self._processes:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _await_end(self) -> None:
        """The launcher's, which cleans up after its ranks."""
        end = time.monotonic() + END_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


@functools.cache
def caches() -> str:
    """A directory for what the ranks of all jobs compile; empty at first, and gone when the tests end."""
    directory = tempfile.mkdtemp(prefix="choros-tests-cache-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def python_path() -> str:
    """Where processes that tests start find modules of tests."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def shortened(stack: str) -> str:
    """Of each thread, what is above pytest."""
    return "\n\n".join(thread.partition(PYTEST)[0].rstrip() for thread in stack.split("\n\n")) + "\n"


def told(reports: Mapping[int, Report]) -> str:
    """What the ranks that failed said."""
    failed = [(rank, report) for rank, report in sorted(reports.items()) if report.outcome == "failed"]
    return "".join(f"rank {rank}:\n{report.text}\n\n" for rank, report in failed)
