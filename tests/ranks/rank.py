"""The program of each rank of a test job: ``python -m ranks.rank DIRECTORY``.

Every rank runs pytest, which collects nothing by itself but runs the cases that it receives, one at a time. While it
waits for the next case, it reads from a socket and uses no processor.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path

import numpy as np
import pytest

import choros
from choros.comm import Communicator, context
from choros.topology import detect
from ranks.job import HIDDEN

TESTS = Path(__file__).parents[1]


class Rank:
    """A plugin of pytest that runs the cases it receives and reports the result of each."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._worst = ("passed", "")
        self._modules = 0

    def pytest_collection(self) -> bool:
        """Nothing is collected beforehand."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs cases until the other side closes the connection."""
        while (case := self._next()) is not None:
            self._worst = ("passed", "")
            module, function = case.split("::")
            try:
                for item in session.perform_collect([f"{TESTS / module.replace('.', '/')}.py::{function}"]):
                    self._keep_modules()
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            except pytest.UsageError as error:  # after a report, if the module cannot be imported
                self._worst = ("failed", self._worst[1] or str(error))
            self._connection.send(self._worst)
        return True

    def _keep_modules(self) -> None:
        """Excludes imported modules from garbage collection, which would traverse them after each case."""
        if len(sys.modules) != self._modules:
            gc.freeze()
            self._modules = len(sys.modules)

    def _next(self) -> str | None:
        try:
            return self._connection.recv()
        except EOFError:
            return None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Counts a module that cannot be imported as a failed case."""
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the worst outcome of a case's setup, call and teardown."""
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.outcome == "failed":
            self._worst = ("failed", "\n".join(filter(None, [self._worst[1], report.longreprtext])))
        elif report.outcome == "skipped" and self._worst[0] == "passed":
            self._worst = ("skipped", report.longrepr[2].removeprefix("Skipped: "))

    @pytest.fixture
    def communicator(self) -> Communicator:
        """The communicator of all ranks."""
        return choros.global_process_set.communicator

    @pytest.fixture(autouse=True)
    def _restore_process_state(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Gives each case the state of a fresh process, and the same random numbers whatever ran before it."""
        seed_all(f"{choros.rank()} {request.node.name}")
        environ = dict(os.environ)
        yield
        os.environ.clear()
        os.environ.update(environ)
        assert choros.is_initialized(), "the case has left the job"
        left = list(context._job.process_sets.values())
        assert not left, "the case has left process sets"
        if "keras" in sys.modules:
            keras = sys.modules["keras"]
            assert keras.config.dtype_policy().name == "float32", "the case has left another policy"
            keras.utils.clear_session()  # collects garbage
        else:
            gc.collect()


def seed_all(seed: str) -> None:
    """Seeds the random number generators of all imported libraries."""
    random.seed(seed)
    number = random.getrandbits(31)
    np.random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(None)  # a global seed affects more than random numbers


def main(directory: str) -> None:
    """Joins the job, and runs cases until the connection closes."""
    faulthandler.register(signal.SIGUSR1, file=Path(directory, f"stack.{os.getpid()}").open("w"))  # noqa: SIM115
    for module in os.environ[HIDDEN].split():
        sys.modules[module] = None
    # One directory per rank: JAX does not expect other processes to read a file that it is writing.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{os.environ['CHOROS_TEST_CACHE']}/{detect(os.environ).rank}"
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    with Client(str(Path(directory, "socket")), "AF_UNIX") as connection:
        choros.init()
        if os.environ.get("KERAS_BACKEND"):
            importlib.import_module("keras")  # before warnings are errors
        connection.send((choros.rank(), os.getpid()))
        argv = ["-c", str(TESTS / "ranks" / "cases.ini"), "--rootdir", str(TESTS), "--noconftest"]
        sys.exit(pytest.main(argv, plugins=[Rank(connection)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
