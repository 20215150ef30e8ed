"""The Keras face on two real ranks of each framework, and on three; the cases are in ``training_cases.py``."""

from harness import Job, check_case, on_frameworks

MODULE = "keras_face.training_cases"
#: Cases that do not depend on the framework, or need one library, with the frameworks that run them.
ON_SOME = {
    "case_best_model_is_saved_by_one_rank_and_loads_without_choros": "torch",
    "case_an_optimizer_before_init_is_an_error": "torch",
    "case_shard_of_tf_data": "tensorflow",
    "case_a_normalization_that_one_rank_has_adapted": "tensorflow jax",  # PyTorch's ranks have no TensorFlow for it
    "case_shard_of_a_torch_data_loader": "torch",
    "case_shard_of_a_shuffled_torch_data_loader_sees_each_example_once": "torch",
    "case_shards_of_torch_data_loaders_that_shuffle_go_on_in_one_order": "torch",
    "case_shard_of_a_torch_stream": "torch",
    "case_shard_of_grain": "torch",
    "case_shard_shuffles_identically_on_all_ranks": "torch",
    "case_shuffling_by_keras_warns": "torch",
    "case_shuffle_continues_after_resuming": "torch",
    "case_shard_of_arrays_is_the_index_split": "torch",
    "case_shard_of_invalid_data_is_an_error": "torch",
    "case_shard_of_pandas_counts_rows_by_position": "torch",
    # Fit on a shard of a PyDataset runs on all, and so do uneven batches.
    "case_shard_of_a_py_dataset_whose_last_batch_is_tiny": "torch",
    "case_sgd_on_even_batches": "torch",
    # Scales and groups are applied to host memory; how the optimizer accumulates is tested on all.
    "case_sum_predivide_and_groups": "torch",
    "case_groups_of_variables": "torch",
    "case_backward_passes_per_step_sums_micro_batches": "torch",
    "case_decorated_train_step_on_uneven_batches": "torch",
    # Metrics of all examples, warm-up and the other decisions of callbacks are tested on all.
    "case_ratio_metrics_equal_those_of_one_process": "jax",
    "case_schedule_by_epoch_within_its_bounds": "jax",
    "case_early_stopping_and_plateau_decide_identically": "jax",
    "case_throughput_counts_all_examples": "jax",
    "case_load_model_continues_the_training_saved_in_an_h5_file": "torch",
    # XLA compiles what JAX trains in any case, and calls back with large arguments only there.
    "case_compiled_with_xla": "tensorflow",
    # TensorFlow's host calls are one function.
    "case_the_way_of_a_step_is_short": "tensorflow",
    # The reducer compresses host memory, and counts micro-batches; accumulation over uneven batches runs on all.
    "case_fp16_compression_is_close": "torch",
    "case_backward_passes_per_step_averages_micro_batches": "torch",
    # The updates of an optimizer are Keras'; what JAX does not do in place is tested there as well.
    "case_adamw_with_clipping_decay_and_moving_average": "torch jax",
    "case_ranks_with_different_numbers_of_batches_and_many_options": "torch tensorflow",
    "case_mixed_bfloat16": "torch jax",
    "case_load_model_continues_the_saved_training": "torch jax",
    "case_weights_and_optimizer_state_are_equal_before_the_first_step": "torch jax",
    "case_validation_metrics_are_over_all_examples": "torch jax",
    "case_warmup_raises_the_rate_of_one_rank_to_that_of_all": "torch jax",
    "case_ranks_that_start_from_different_weights_are_told_so": "torch tensorflow",
    "case_a_local_variable_may_differ": "torch tensorflow",
    "case_shard_of_a_py_dataset": "torch tensorflow",
    "case_large_gradients_with_one_core_a_rank": "jax",
}
#: The cases of three ranks, on one framework; two ranks run all cases.
CORE = (
    "case_sgd_with_momentum_on_uneven_batches",
    "case_adam_with_global_clipnorm_on_uneven_batches",
    "case_last_batch_smaller_than_the_number_of_ranks",
    "case_gradients_that_are_reduced_where_they_are",
    "case_ranks_with_different_numbers_of_batches",
    "case_process_set_trains_its_members_only",
)


@on_frameworks(MODULE, ON_SOME, CORE)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
