"""One body a behaviour, on every engine; real ranks share one launch for each number of them."""

import pytest

from comm.engines import ALONE, TOGETHER, check
from harness import case_names

pytestmark = pytest.mark.timeout(300)
COLLECTIVES = "comm.collective_cases"
MISMATCHES = "comm.mismatch_cases"


@pytest.mark.parametrize(("engine", "size"), ALONE + TOGETHER)
@pytest.mark.parametrize("case", case_names(COLLECTIVES))
def test_collective(case: str, engine: str, size: int) -> None:
    check(COLLECTIVES, case, engine, size)


@pytest.mark.parametrize(("engine", "size"), TOGETHER)
@pytest.mark.parametrize("case", case_names(MISMATCHES))
def test_mismatch(case: str, engine: str, size: int) -> None:
    check(MISMATCHES, case, engine, size)
