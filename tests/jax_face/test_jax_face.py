"""The JAX API on two ranks, and on three; the cases are in ``collective_cases.py`` and ``training_cases.py``."""

import pytest

from harness import Job, check_case, needs, on

COLLECTIVES = "jax_face.collective_cases"
TRAINING = "jax_face.training_cases"


@on(Job(2, "jax"), cases=COLLECTIVES)
def test_collectives(case: str, job: Job) -> None:
    check_case(COLLECTIVES, case, job)


@needs("optax")
@on(Job(2, "jax"), cases=TRAINING)
def test_training(case: str, job: Job) -> None:
    check_case(TRAINING, case, job)


@pytest.mark.program
@needs("optax")
@on(Job(3, "jax"))
def test_training_on_three_ranks(job: Job) -> None:
    check_case(TRAINING, "case_uneven_batches_and_ranks_that_join_early", job)
