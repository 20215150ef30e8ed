import pytest

from harness import FRAMEWORKS, case_names, check_case

OPS = "parallel.ops_cases"


@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
@pytest.mark.parametrize("case", case_names(OPS))
def test_two_ranks(case: str, framework: str) -> None:
    check_case(OPS, 2, case, framework)
