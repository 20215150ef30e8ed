"""The state of a run of ``fit``; the cases are in ``run_state_cases.py``."""

import pytest

from harness import Job, check_case, on_frameworks

MODULE = "training.run_state_cases"
ON_SOME = {
    "case_a_process_that_joins_counts_no_examples_of_others": "torch",
    "case_a_state_of_another_model_is_refused_and_changes_nothing": "torch",
    "case_one_rank_captures_for_another": "torch",
    "case_commits_find_what_training_has_prepared": "torch",
}


@pytest.mark.each_framework
@on_frameworks(MODULE, ON_SOME)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
