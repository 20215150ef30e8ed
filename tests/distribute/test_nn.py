import numpy as np

from choros import nn
from harness import Job, check_case, on_frameworks

MODULE = "distribute.nn_cases"


@on_frameworks(MODULE)
def test_two_replicas(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


def test_without_a_job() -> None:
    assert nn.compute_average_loss(np.array([1.0, 2.0, 6.0])) == 3.0
    assert nn.scale_regularization_loss(2.0) == 2.0
