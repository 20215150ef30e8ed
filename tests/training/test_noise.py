"""The gradient noise scale where users see it; its numbers: ``tests/parallel/test_noise.py``."""

from harness import Job, check_case, on, on_frameworks

FIT, LOOP = "training.noise_cases", "torch_face.noise_cases"


@on_frameworks(FIT, on_three=["case_a_strategy"])
def test_fit(case: str, job: Job) -> None:
    check_case(FIT, case, job)


@on(Job(2, "torch"), cases=LOOP)
def test_a_loop(case: str, job: Job) -> None:
    check_case(LOOP, case, job)
