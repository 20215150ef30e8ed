"""The synchronous strategies on each framework, on two real ranks; the cases are in ``strategy_cases.py``."""

import pytest

from harness import FRAMEWORKS, case_names, check_case

MODULE = "distribute.strategy_cases"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, framework: str) -> None:
    check_case(MODULE, 2, case, framework)
