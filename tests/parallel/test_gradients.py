import pytest

from harness import FRAMEWORKS, case_names, check_case

GRADIENTS = "parallel.gradient_cases"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", case_names(GRADIENTS))
def test_two_ranks(case: str, framework: str) -> None:
    check_case(GRADIENTS, 2, case, framework)
