"""Epochs of every kind of data, on the framework of the package that defines it."""

import pytest

from harness import check_case, on_frameworks
from ranks.job import Job

ON = {
    "case_a_data_loader": "torch",
    "case_a_data_loader_whose_order_may_differ_is_in_doubt": "torch",
    "case_a_generator_is_in_doubt": "torch",
    "case_a_py_dataset": "torch",
    "case_a_py_dataset_that_another_fit_has_read_has_that_order_in_a_process_that_has_not": "torch",
    "case_a_torch_stream": "torch",
    "case_an_epoch_without_batches_here_is_no_longer_one_for_the_next_fit": "torch",
    "case_arrays": "torch",
    "case_arrays_have_the_order_that_they_have_without_elastic_training": "torch",
    "case_data_that_the_first_rank_has_read_more_often_have_its_order_on_all": "torch",
    "case_epochs_of_steps_are_those_of_a_process_that_has_read_none_before": "torch",
    "case_grain": "torch",
    "case_tf_data": "tensorflow",
    "case_tf_data_that_do_not_end": "tensorflow",
    "case_tf_data_that_processes_read_in_part_is_in_doubt": "tensorflow",
    "case_tf_data_without_a_seed_is_an_error": "tensorflow",
    "case_what_shard_returns_remembers_its_source": "torch",
    "case_what_the_program_has_sharded_is_in_doubt": "torch",
}


@on_frameworks("elastic.epoch_cases", on_some=ON)
@pytest.mark.each_framework
def test_epochs(case: str, job: Job) -> None:
    check_case("elastic.epoch_cases", case, job)
