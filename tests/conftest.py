"""Tests of one job are run one after the other, so that each job is started once.

With pytest-xdist, one worker runs all tests that need ranks of TensorFlow, job by job, and another those of all other
ranks; then they share the remaining files.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import pytest

from harness import Job
from parts import PARTS, job_of
from ranks import pool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script that starts pytest in the background has it ignored, and so would everything that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HIDDEN_MODULES = str(Path(__file__).parent / "hidden")
if HIDDEN_MODULES in sys.path:  # a worker of pytest-xdist is itself started by pytest
    sys.path.remove(HIDDEN_MODULES)
else:
    os.environ["PYTHONPATH"] = os.pathsep.join([HIDDEN_MODULES, *filter(None, [os.environ.get("PYTHONPATH")])])


def group_of(job: Job) -> str:
    """The tests that one worker of pytest-xdist runs: those of TensorFlow take about as long as all others."""
    return f"{job.framework} ranks" if job.framework == "tensorflow" else "ranks"


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
        item.add_marker(pytest.mark.xdist_group(group_of(job) if job else item.path.stem))
    items.sort(key=lambda item: order[job_of(item)])


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if job_of(item) != job_of(nextitem):
        pool.close()


def pytest_sessionfinish() -> None:
    pool.close()
