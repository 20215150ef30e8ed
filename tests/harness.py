"""Cases that run on real ranks.

A *case* is a function ``case_…()`` of a module ``…_cases`` under ``tests``: every rank of a job runs it, with pytest's
fixtures, between ``choros.init()`` and the end. A test has the job among its parameters and checks one case on it::

    @on(Job(2, "torch"), Job(2, "jax"), cases=MODULE)
    def test_two_ranks(case: str, job: Job) -> None:
        check_case(MODULE, case, job)

Jobs keep running from test to test; see ``ranks/pool.py``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest

from ranks import pool
from ranks.job import CHOROSRUN, Job, free_port
from ranks.running import Broken, CannotStart, failures_of

__all__ = [
    "CHOROSRUN",
    "FRAMEWORKS",
    "ROOT",
    "TESTS",
    "Job",
    "case_names",
    "check_case",
    "free_port",
    "needs",
    "on",
    "on_frameworks",
    "skip_if_left_out",
]

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
FRAMEWORKS = os.environ.get("CHOROS_TEST_FRAMEWORKS", "tensorflow torch jax").split()


def case_names(module: str) -> list[str]:
    """The cases of a module, read without importing it: it may need a framework."""
    source = (TESTS / (module.replace(".", "/") + ".py")).read_text()
    return [line[4:].split("(")[0] for line in source.splitlines() if line.startswith("def case_")]


def needs(module: str) -> pytest.MarkDecorator:
    """Skips a test if ``module`` is not installed; does not import it to find out."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


def on(*jobs: Job, cases: str = "") -> pytest.MarkDecorator:
    """Runs a test once for each of these jobs, passed as its parameter ``job``; of a module's ``cases`` each, too."""
    if not cases:
        return pytest.mark.parametrize("job", jobs, ids=str)
    return pytest.mark.parametrize(("case", "job"), list(itertools.product(case_names(cases), jobs)), ids=str)


def on_frameworks(
    module: str, on_some: Mapping[str, str] = MappingProxyType({}), on_three: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Runs a test, with parameters ``case`` and ``job``, for each case of ``module`` on two ranks of each framework.

    Args:
        module: below ``tests``, such as ``"keras_face.training_cases"``.
        on_some: the frameworks of each case that does not run on all, separated by spaces; of a parametrized one, each
            of its parameters may be a case, as ``case_optimizer[sgd]``.
        on_three: the cases that run on three ranks, too, of one framework.
    """
    cases = [
        each
        for case in case_names(module)
        for each in [given for given in on_some if given.startswith(f"{case}[")] or [case]
    ]
    named = {*on_some, *on_three}
    assert named <= set(cases), named - set(cases)
    pairs = [
        (case, Job(2, each)) for case in cases for each in (on_some[case].split() if case in on_some else FRAMEWORKS)
    ]
    pairs += [(case, Job(3, "torch")) for case in on_three]
    return pytest.mark.parametrize(("case", "job"), pairs, ids=str)


def skip_if_left_out(framework: str) -> None:
    """Skips the test if CHOROS_TEST_FRAMEWORKS names others than its ``framework``; ``""``: it has none."""
    if framework and framework not in FRAMEWORKS:
        pytest.skip(f"CHOROS_TEST_FRAMEWORKS leaves out {framework}")


def check_case(module: str, case: str, job: Job) -> None:
    """Runs ``case`` on ``job``; fails if it fails on any rank, and skips the test if all ranks skip it.

    Args:
        module: below ``tests``, such as ``"comm.collective_cases"``.
        case: a function of it.
        job: the job that runs it.
    """
    skip_if_left_out(job.framework)
    try:
        reports = pool.running(job).run(f"{module}::{case}")
        failed = failures_of(reports)
    except CannotStart as error:
        pytest.skip(str(error))
    except Broken as error:
        reports, failed = {}, str(error)
    except BaseException:
        pool.close(by_force=True)
        raise
    if failed:
        # The other ranks may still be in the middle of a collective.
        pool.close(by_force=True)
        pytest.fail(failed, pytrace=False)
    if all(report.outcome == "skipped" for report in reports.values()):
        pytest.skip(reports[0].text)
