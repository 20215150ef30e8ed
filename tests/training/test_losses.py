"""Losses and metrics on two real ranks of each framework, and on three; the cases are in ``loss_cases.py``."""

from harness import Job, check_case, on_frameworks

MODULE = "training.loss_cases"
#: Cases that not every framework runs. A loss tells what it divided by in few ways, which sums, masks and several
#: outputs run through; ranks' metrics meet on the host.
ON_SOME = {
    "case_mean_with_sample_weight": "torch",
    "case_class_weights": "torch",
    "case_plain_function_and_confusion_matrices": "torch",
    "case_masked_sequences": "torch jax",
    "case_masked_sequences_with_sample_weights": "torch tensorflow",
    "case_masked_sequences_of_other_reductions": "torch",
    "case_outputs_with_different_reductions": "torch jax",
    "case_masks_and_weights_of_a_batch_of_one_row_in_the_middle": "torch",
    "case_accumulation_of_a_sum": "torch tensorflow",
    "case_metric_whose_weights_are_those_of_batches_is_warned_of": "torch tensorflow",
    "case_metric_that_keeps_a_maximum_and_a_minimum": "torch jax",
    "case_gradient_of_a_vector": "tensorflow",  # others differentiate scalars only
    "case_gradient_of_a_vector_eagerly": "tensorflow",
    "case_added_loss_that_is_a_vector_in_horovods_face": "torch tensorflow",
    "case_sum_of_gradients_of_a_sum": "torch",
    "case_zipped_data_sets": "tensorflow",
    "case_a_mean_and_a_sum_in_one_line": "torch tensorflow",
    "case_gradient_of_a_sum": "torch tensorflow",  # JAX's step gives its metric a number
    "case_added_loss_that_is_a_sum_beside_a_compute_loss_of_the_users": "torch jax",
    "case_gradients_of_a_sum_in_jaxs_ways": "jax",
    "case_gradients_of_which_no_loss_is_seen_are_said": "jax",
    "case_gradients_of_each_example_with_as_many_numbers_as_rows": "jax",
    "case_a_step_that_has_one_number_of_rows": "jax",
    "case_a_loss_in_jaxs_checkpoint": "jax",
    "case_constants_with_as_many_numbers_as_one_rank_or_all_have_rows": "jax",
    "case_parts_of_which_one_is_summed": "torch",
    # Keras' trainer on JAX has the state of one optimizer.
    "case_two_optimizers": "torch tensorflow",
    "case_two_optimizers_and_a_sum": "torch",
    "case_two_optimizers_that_were_created_outside_of_the_scope": "torch",
    "case_metric_function_that_returns_a_ratio_is_said": "torch",
    "case_two_optimizers_in_horovods_face": "torch",
}
#: The cases of three ranks, on one framework.
CORE = (
    "case_sum",
    "case_masked_sequences",
    "case_plain_function_and_confusion_matrices",
    "case_two_optimizers",
    "case_parts_with_different_numbers_of_rows",
)


@on_frameworks(MODULE, ON_SOME, CORE)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
