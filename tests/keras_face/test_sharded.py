"""Optimizers of which each rank has a slice of the state, on two and three ranks; see ``sharded_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, check_case, on_frameworks

MODULE = "keras_face.sharded_cases"
#: The optimizers, of which each framework has some: what they do with slices depends little on it.
OPTIMIZERS = {
    "case_optimizer[sgd]": "torch",
    "case_optimizer[adam]": "torch tensorflow",
    "case_optimizer[adamw]": "torch jax",
    "case_optimizer[adamax]": "torch",
    "case_optimizer[nadam]": "torch jax",
    "case_optimizer[rmsprop]": "torch tensorflow",
    "case_optimizer[adagrad]": "torch",
    "case_optimizer[adadelta]": "torch",
    "case_optimizer[ftrl]": "torch",
    "case_optimizer[lion]": "torch",
    "case_optimizer[muon]": "torch tensorflow",
    "case_optimizer[adafactor]": "torch jax",
    "case_optimizer[lamb]": "torch",
}
ON_SOME = {
    **OPTIMIZERS,
    "case_a_process_set": "",  # of fewer ranks than all: on three
    "case_bytes_of_a_rank": "torch",
    "case_constraints_are_of_whole_weights": "torch",
    "case_compression": "torch",
    "case_backward_passes_per_step": "torch",
    "case_an_optimizer_that_was_built_before": "torch",
    "case_clipped_gradients_of_another_dtype": "tensorflow",
    "case_what_keras_checks": "torch",
    "case_dropped_optimizers_are_freed": "torch tensorflow",
    "case_few_trained_weights_of_many": "torch jax",
    "case_ranks_that_start_from_different_weights": "torch tensorflow",
    "case_a_second_model_that_starts_from_different_weights": "torch tensorflow",
    "case_rows_of_an_embedding": "torch tensorflow",
}
ON_THREE = (
    "case_optimizer[adam]",
    "case_optimizer[muon]",
    "case_bytes_of_a_rank",
    "case_fit_with_a_last_batch_of_one_row",
    "case_a_process_set",
    "case_one_rank_alone_saves_files_of_one_process",
)


@on_frameworks(MODULE, ON_SOME, ON_THREE)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.nightly
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_each_optimizer_on_each_framework(case: str, framework: str) -> None:
    check_case(MODULE, case, Job(2, framework))
