from harness import Job, check_case, on_frameworks

GRADIENTS = "parallel.gradient_cases"


@on_frameworks(GRADIENTS)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(GRADIENTS, case, job)
