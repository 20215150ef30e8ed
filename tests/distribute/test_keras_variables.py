from harness import Job, check_case, on_frameworks

MODULE = "distribute.keras_variable_cases"


@on_frameworks(MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
