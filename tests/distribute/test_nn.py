import numpy as np
import pytest

from choros import nn
from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "distribute.nn_cases"


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_replicas(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


def test_without_a_job() -> None:
    assert nn.compute_average_loss(np.array([1.0, 2.0, 6.0])) == 3.0
    assert nn.scale_regularization_loss(2.0) == 2.0
