"""Tests of one job are run one after the other, so that each job is started once.

With pytest-xdist, one worker runs all tests that need ranks, job by job, and the others run the remaining files.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import pytest

from harness import Job
from ranks import pool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script that starts pytest in the background has it ignored, and so would everything that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HIDDEN_MODULES = str(Path(__file__).parent / "hidden")
if HIDDEN_MODULES in sys.path:  # a worker of pytest-xdist is itself started by pytest
    sys.path.remove(HIDDEN_MODULES)
else:
    os.environ["PYTHONPATH"] = os.pathsep.join([HIDDEN_MODULES, *filter(None, [os.environ.get("PYTHONPATH")])])

#: The jobs of parts of the suite: two ranks without a framework, and with the one that is imported fastest.
PARTS = {"quick": (None, Job(2), Job(2, "torch")), "pure": (None,)}
#: The part that has all that the quick one leaves out.
REST = "rest"


def job_of(item: pytest.Item | None) -> Job | None:
    """The job that a test requests, if any."""
    callspec = getattr(item, "callspec", None)
    job = callspec.params.get("job") if callspec else None
    return job if isinstance(job, Job) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    text = (
        "quick: tests of at most two ranks and one framework; pure: tests without ranks; neither runs slow tests; "
        "rest: all that quick leaves out"
    )
    parser.addoption("--part", choices=(*PARTS, REST), help=text)


def is_in(item: pytest.Item, part: str) -> bool:
    """Whether a test belongs to a part of the suite."""
    if part == REST:
        return not is_in(item, "quick")
    return job_of(item) in PARTS[part] and not item.get_closest_marker("slow")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        chosen = [item for item in items if is_in(item, part)]
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    order: dict[Job | None, float] = {None: math.inf}
    for item in items:
        job = job_of(item)
        order.setdefault(job, len(order))
        item.add_marker(pytest.mark.xdist_group("ranks" if job else item.path.stem))
    items.sort(key=lambda item: order[job_of(item)])


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if job_of(item) != job_of(nextitem):
        pool.close()


def pytest_sessionfinish() -> None:
    pool.close()
