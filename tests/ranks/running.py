"""A running job: its ranks wait for cases and report the result of each."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from ranks.environment import CACHE, NO_PLUGINS, QUICK, python_path
from ranks.job import Job
from warm.servers import warm_python

#: Limits for processes that hang, on a machine that is busy with other work too.
START_SECONDS, CASE_SECONDS, END_SECONDS = 180, 150, 60
#: The limit for the other ranks after the first one has failed: they may wait for it without a limit.
GRACE_SECONDS = 10
#: A program's exit code if this machine cannot run such ranks.
CANNOT = 75

#: The start of the first frame of pytest in a stack.
PYTEST = '  File "' + str(Path(pytest.__file__).parents[1] / "_pytest")


class CannotStart(Exception):
    """This machine cannot run such ranks; the text has the reason."""


class Broken(Exception):
    """A job cannot continue; the text has the reason."""


@dataclass(frozen=True)
class Report:
    """The result of a case on a rank.

    Attributes:
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        text: the traceback, or the reason.
    """

    outcome: str
    text: str = ""


@dataclass(frozen=True)
class Member:
    """A rank: its process, and the connection to it."""

    rank: int
    pid: int
    connection: Connection


class Running:
    """The processes of a job, from their start to their end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._directory = Path(tempfile.mkdtemp(prefix="choros-tests-"))  # for this user alone
        self._log = self._directory / "log"
        self._launcher: subprocess.Popen[bytes] | None = None
        self._members: list[Member] = []
        try:
            self._begin()
        except BaseException:
            self.kill()
            raise

    def _begin(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._directory / "socket"))
            listener.listen()
            program = (*self._python(), "-m", "ranks.rank", str(self._directory))
            self._launcher = self._start(self.job.launcher.command(self.job.ranks, program))
            connections = self._accept_ranks(listener, self._launcher)
        self._members += [Member(*connection.recv(), connection) for connection in connections]
        self._members.sort(key=lambda member: member.rank)

    def _python(self) -> tuple[str, ...]:
        """Ranks with a framework are copies of a process that has imported it."""
        return warm_python(self.job.framework) if self.job.framework and not self.job.anew else (sys.executable,)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        paths = {"PYTHONPATH": python_path(), "CHOROS_TEST_CACHE": caches()}
        environ = {**os.environ, **QUICK, **CACHE, **NO_PLUGINS, **paths, **self.job.environment()}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=environ,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _accept_ranks(self, listener: socket.socket, launcher: subprocess.Popen[bytes]) -> list[Connection]:
        listener.settimeout(0.1)
        connections: list[Connection] = []
        end = time.monotonic() + START_SECONDS
        while len(connections) < self.job.ranks:
            code = launcher.poll()
            if code == CANNOT:
                raise CannotStart(self._log.read_text().strip())
            if code is not None or time.monotonic() > end:
                problem = "took too long" if code is None else f"ended with {code}"
                raise Broken(
                    f"the job {problem} before its {self.job.ranks} ranks had connected:\n{self._log.read_text()}"
                )
            with suppress(TimeoutError):
                connections.append(Connection(listener.accept()[0].detach()))
        return connections

    def run(self, case: str) -> dict[int, Report]:
        """Runs ``case``, a module and a function, on all ranks; returns the report of each.

        Raises:
            Broken: not all ranks finished it.
        """
        begin = self._log.stat().st_size
        for member in self._members:
            with suppress(OSError):  # A rank that has ended is detected below.
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
            output = self._log.read_bytes()[begin:].decode(errors="replace")
            raise Broken(f"{failures_of(reports)}{problem}\n{output}")
        return reports

    def _why_not_ended(self, pending: list[Member], reports: dict[int, Report]) -> str:
        """A text that these ranks did not finish in time, with their stacks."""
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
        """Kills the remaining processes, and removes the job's files."""
        for member in self._members:
            if self._launcher and self._launcher.poll() is None:
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
            member.connection.close()
        if self._members:
            self._await_end()
        if self._launcher:
            with suppress(OSError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _await_end(self) -> None:
        """Waits for the launcher, which cleans up after its ranks."""
        if self._launcher:
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(END_SECONDS)


@functools.cache
def caches() -> str:
    """The compile caches of the ranks of all jobs: a directory that is removed when the tests end."""
    directory = tempfile.mkdtemp(prefix="choros-tests-cache-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def shortened(stack: str) -> str:
    """The stack without pytest's frames, for each thread."""
    return "\n\n".join(thread.partition(PYTEST)[0].rstrip() for thread in stack.split("\n\n")) + "\n"


def failures_of(reports: Mapping[int, Report]) -> str:
    """The failures of all failed ranks, as one text."""
    failed = [(rank, report) for rank, report in sorted(reports.items()) if report.outcome == "failed"]
    return "".join(f"rank {rank}:\n{report.text}\n\n" for rank, report in failed)
