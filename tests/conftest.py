"""Tests of one job are run one after the other, so that each job is started once.

With pytest-xdist, one worker runs all tests that need ranks of TensorFlow, job by job, and another those of all other
ranks, while the others begin with those that start processes of their own and mostly wait for them. Of these, each
goes to the worker that is free, and a file that shares a fixture to one.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

import mpi4py
import pytest
from _pytest.runner import runtestprotocol

from choros import durations
from harness import Job
from parts import PARTS, job_of, params_of
from ranks import pool
from standstill import stood_still, watch
from warm.servers import open_directory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script that starts pytest in the background has it ignored, and so would everything that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules of the mpi engine are imported here in any order; MPI, begun in this process, would leave its shared memory.
mpi4py.rc.initialize = mpi4py.rc.finalize = False

HIDDEN_MODULES = str(Path(__file__).parent / "hidden")
if HIDDEN_MODULES in sys.path:  # a worker of pytest-xdist is itself started by pytest
    sys.path.remove(HIDDEN_MODULES)
else:
    os.environ["PYTHONPATH"] = os.pathsep.join([HIDDEN_MODULES, *filter(None, [os.environ.get("PYTHONPATH")])])

#: A test that has no other fixtures shares nothing with others of its file.
OWN_FIXTURES = {"tmp_path", "tmp_path_factory", "monkeypatch", "capsys", "capfd", "caplog", "request"}
#: The property of a test in which the machine stood still, with how it failed then: see ``standstill.py``.
MADE_AGAIN = "made again"


def pytest_configure(config: pytest.Config) -> None:
    """Shortens the durations of processes that tests start; pytest's own, which tests compare, has read them before."""
    # Each process that tests start would compile choros anew, which takes as long as importing it thrice, and each
    # worker the tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_workers:
        os.environ[durations.TEST_SCALE] = "0.25"
    if not hasattr(config, "workerinput"):
        watch(open_directory())


def group_of(item: pytest.Item) -> str | None:
    """The tests that one worker of pytest-xdist runs: those of TensorFlow take about as long as all others on ranks."""
    if job := job_of(item):
        return f"{job.framework} ranks" if job.framework == "tensorflow" else "ranks"
    shares = set(getattr(item, "fixturenames", ())) - OWN_FIXTURES - params_of(item).keys()
    return None if item.get_closest_marker("slow") and not shares else item.path.stem


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "; ".join(f"{name}: {' '.join(str(choose.__doc__).split())}" for name, choose in PARTS.items())
    parser.addoption("--part", choices=tuple(PARTS), help=text)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        chosen = PARTS[part](items)
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    order: dict[Job | None, float] = {None: math.inf}
    for item in items:
        job = job_of(item)
        order.setdefault(job, len(order))
        if not item.get_closest_marker("xdist_group") and (group := group_of(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    # What takes long comes first, so that the workers end together.
    items.sort(key=lambda item: (order[job_of(item)], not item.get_closest_marker("slow")))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Makes a test once more that has failed while the machine stood still."""
    began = time.monotonic()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failures = "\n".join(report.longreprtext for report in reports if report.failed)
    if failures and MADE_AGAIN not in dict(item.user_properties) and stood_still(began):
        item.user_properties.append((MADE_AGAIN, failures))
        pool.start_anew()
        item.session._setupstate.teardown_exact(None)  # and what several tests share
        for forget in pool.FORGET:
            forget()
        item._initrequest()
        return item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", "") == "call" and (failures := dict(report.user_properties).get(MADE_AGAIN)):
            terminalreporter.section(f"{report.nodeid}: made again, as the machine stood still in it")
            terminalreporter.write_line(failures)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if job_of(item) != job_of(nextitem):
        pool.close()


def pytest_sessionfinish() -> None:
    pool.close()
