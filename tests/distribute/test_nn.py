import numpy as np
import pytest

from choros import nn
from harness import FRAMEWORKS, case_names, check_case

MODULE = "distribute.nn_cases"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_replicas(case: str, framework: str) -> None:
    check_case(MODULE, 2, case, framework)


def test_alone_no_job_is_needed() -> None:
    assert nn.compute_average_loss(np.array([1.0, 2.0, 6.0])) == 3.0
    assert nn.scale_regularization_loss(2.0) == 2.0
