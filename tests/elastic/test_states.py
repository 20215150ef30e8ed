"""Horovod's elastic API on two ranks."""

import pytest

from harness import check_case, on_frameworks
from ranks.job import Job

ON = {
    "case_a_model_without_variables_is_an_error": "torch",
    "case_a_commit_between_the_backward_passes_of_a_step_of_torch_is_warned_of": "torch",
    "case_a_commit_has_the_state_of_all_optimizers": "torch",
    "case_an_error_of_the_first_rank_is_raised_on_all": "torch",
    "case_a_commit_of_a_torch_state_is_in_host_memory": "torch",
    "case_a_commit_of_a_torch_state_is_of_all_values_or_none": "torch",
    "case_a_scheduler_of_any_class_stays_that_of_its_optimizer": "torch",
    "case_a_torch_state_goes_on_from_the_last_commit": "torch",
    "case_a_torch_state_is_synchronised_and_its_values_can_be_replaced": "torch",
    "case_jax_parameters_are_objects": "jax",
    "case_ranks_notice_changed_hosts_together": "torch",
    "case_the_sampler_of_a_state_of_objects_is_the_given_one": "jax",
    "case_tensorflow_states": "tensorflow",
}


@on_frameworks("elastic.state_cases", on_some=ON)
@pytest.mark.each_framework
def test_states(case: str, job: Job) -> None:
    check_case("elastic.state_cases", case, job)
