"""The synchronous strategies on each framework, on two real ranks."""

from harness import Job, check_case, on_frameworks

MODULE = "distribute.strategy_cases"
LOOPS = "distribute.custom_loop_cases"
#: Cases that do not depend on the framework, or need one library, with the frameworks that run them.
ON_SOME = {
    # The optimizer is that of ``keras_face/training_cases.py``, where these arguments are tested on all frameworks.
    # Under ``MirroredStrategy``, ``training/test_matrix.py`` has them, and regularisation on PyTorch.
    "case_central_storage_with_clipping_and_momentum": "torch",
    "case_infinity_on_one_replica_only": "torch",
    "case_mixed_precision_scales_the_loss_by_itself": "torch",
    # Rows are shared out before Keras receives them, and class weights become weights of examples.
    "case_class_weights": "torch",
    "case_shuffled_epochs_see_every_example_once": "torch",
    "case_batches_of_tf_data": "tensorflow",
    "case_batches_of_a_data_loader": "torch",
    "case_batches_of_a_data_loader_that_shuffles_by_a_generator": "torch",
    "case_batches_of_a_generator": "torch",
    "case_batches_of_a_py_dataset_are_shuffled": "torch",
    "case_predictions_of_batches_of_one_row": "torch",
    # Keras' callbacks and files; JAX differs most, as it has the weights elsewhere during an epoch.
    "case_callbacks_receive_global_metrics": "jax",
    "case_files_are_written_once_and_training_resumes": "jax",
    "case_saved_models_load_inside_and_outside_of_a_scope": "jax",
    "case_fit_that_another_library_has_replaced": "torch",
    # The strategies differ in where they keep the optimizer's state; MirroredStrategy runs on all.
    "case_multi_worker_mirrored_equals_one_device": "torch",
    "case_central_storage_equals_one_device": "torch jax",
    "case_gradient_accumulation_with_central_storage": "torch",
    # Losses say what they divided by; test_losses.py has more of them.
    "case_several_inputs_and_outputs": "torch tensorflow",
    "case_example_weights": "torch jax",
    "case_regularisation_counts_once": "tensorflow",
    "case_later_calls_of_fit_go_on_with_the_orders_of_a_shuffled_data_set": "tensorflow",
    "case_several_steps_per_execution": "torch tensorflow",
    "case_batches_of_a_py_dataset": "torch jax",
    "case_single_batches_equal_one_device": "torch jax tensorflow",
    "case_evaluate_and_predict_equal_one_device": "torch jax",
    "case_tensors_and_held_out_data_smaller_than_the_replicas": "torch tensorflow",
    "case_an_exported_model_serves_outside": "tensorflow",
    "case_checkpoints_of_tensorflow_restore_with_and_without_a_strategy": "tensorflow",
}


@on_frameworks(MODULE, ON_SOME)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on_frameworks(LOOPS)
def test_custom_loops(case: str, job: Job) -> None:
    check_case(LOOPS, case, job)
