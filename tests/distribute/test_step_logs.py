"""What steps and callbacks of the user's own do, on two ranks of each framework; see ``step_logs_cases.py``."""

import pytest

from harness import Job, check_case, on_frameworks

MODULE = "distribute.step_logs_cases"
ON_SOME = {
    "case_what_a_step_returns_by_the_name_of_a_metric": "tensorflow torch",  # JAX's step is another
    "case_what_a_step_returns_of_a_metric_by_another_name": "tensorflow torch",
    "case_metrics_that_a_step_returns_as_the_guides_do": "tensorflow torch",
    "case_a_metric_of_several_numbers_that_a_step_returns": "tensorflow torch",
    "case_a_metric_without_variables_is_said": "torch",
    "case_an_optimizer_of_pytorch_in_a_train_step": "torch",
    "case_arrays_of_text_and_without_rows": "tensorflow",
    "case_predictions_of_padded_batches_and_text": "tensorflow",
    "case_predictions_of_sparse_rows_say_nothing": "tensorflow",
    "case_the_result_of_a_metric_in_a_compiled_function": "tensorflow",
    "case_a_queue_of_rows_is_warned_of": "tensorflow torch",
    "case_a_predict_step_that_needs_labels": "tensorflow torch",
}


@on_frameworks(MODULE, ON_SOME)
@pytest.mark.each_framework
def test_step_logs(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
