"""The callback ``TensorBoard``; the cases are in ``tensorboard_cases.py``. With several ranks: ``tests/examples``."""

import pytest

from harness import FRAMEWORKS, case_names, check_case

MODULE = "keras_face.tensorboard_cases"


@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name != "tensorflow"])
@pytest.mark.parametrize("case", case_names(MODULE))
def test_one_rank(case: str, framework: str) -> None:
    check_case(MODULE, 1, case, framework)
