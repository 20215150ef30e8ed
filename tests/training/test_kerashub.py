"""KerasHub's tasks on one and two real ranks of each framework; the cases are in ``kerashub_cases.py``.

KerasHub is not among what the tests install: it needs tensorflow-text, which brings TensorFlow of one version.
"""

import pytest

from harness import FRAMEWORKS, Job, check_case, needs, on
from ranks.job import HIDDEN

MODULE = "training.kerashub_cases"

pytestmark = [needs("keras_hub"), needs("tensorflow"), pytest.mark.slow, pytest.mark.program]


#: Also those of PyTorch find TensorFlow, which KerasHub prepares data with.
JOBS = [Job(ranks, each, ((HIDDEN, ""),), anew=True, name="kerashub") for each in FRAMEWORKS for ranks in (1, 2)]


@on(*JOBS, cases=MODULE)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
