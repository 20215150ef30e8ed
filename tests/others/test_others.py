"""Scripts of the kinds that people bring, written anew: two ranks end with the losses and weights of one process."""

from __future__ import annotations

import pytest

from harness import FRAMEWORKS, Job, check_case
from others.scripts import ROADS, SCRIPTS

TRAININGS = [
    (script, road, Job(2, framework))
    for script, frameworks in SCRIPTS.items()
    for road in ROADS
    for framework in frameworks.split()
    if framework in FRAMEWORKS
]


@pytest.mark.parametrize(("script", "road", "job"), TRAININGS, ids=str)
def test_two_ranks(script: str, road: str, job: Job) -> None:
    check_case("others.script_cases", f"case_trains_as_plain[{script}-{road}]", job)
