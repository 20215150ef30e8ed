"""What losses tell about the rows, on each framework; the cases are in ``form_cases.py``."""

from harness import Job, check_case, on_frameworks

MODULE = "training.form_cases"


OF_TENSORFLOW = ("case_forms_where_the_number_of_rows_is_not_known", "case_lengths_of_tensorflows_arrays")


@on_frameworks(MODULE, dict.fromkeys(OF_TENSORFLOW, "tensorflow"))
def test_forms(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
