"""The Keras face on two real ranks of each framework, and on three; the cases are in ``training_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "keras_face.training_cases"
#: Cases that do not depend on the framework, or need one library, with the framework that runs them.
ON_ONE = {
    "case_best_model_is_saved_by_one_rank_and_loads_without_choros": "torch",
    "case_an_optimizer_before_init_is_an_error": "torch",
    "case_shard_of_tf_data": "tensorflow",
    "case_shard_of_a_torch_data_loader": "torch",
    "case_shard_of_a_shuffled_torch_data_loader_sees_each_example_once": "torch",
    "case_shard_of_a_torch_stream": "torch",
    "case_shard_of_grain": "torch",
    "case_shard_shuffles_identically_on_all_ranks": "torch",
    "case_shuffling_by_keras_warns": "torch",
    "case_shuffle_continues_after_resuming": "torch",
    "case_shard_of_arrays_is_the_index_split": "torch",
    "case_shard_of_invalid_data_is_an_error": "torch",
}
#: The cases of three ranks, on one framework; two ranks run all cases.
CORE = (
    "case_sgd_with_momentum_on_uneven_batches",
    "case_adam_with_global_clipnorm_on_uneven_batches",
    "case_last_batch_smaller_than_the_number_of_ranks",
    "case_ranks_with_different_numbers_of_batches",
    "case_process_set_trains_its_members_only",
)


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", [name for name in case_names(MODULE) if name not in ON_ONE])
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.parametrize(("case", "job"), [(case, Job(2, framework)) for case, framework in ON_ONE.items()], ids=str)
def test_one_framework(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(Job(3, "torch"))
@pytest.mark.parametrize("case", CORE)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
