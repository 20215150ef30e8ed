"""The synchronous strategies on each framework, on two real ranks."""

from harness import Job, check_case, on_frameworks

MODULE = "distribute.strategy_cases"
LOOPS = "distribute.custom_loop_cases"
#: Cases that do not depend on the framework, or need one library, with the framework that runs them.
ON_ONE = {
    # The optimizer is that of ``keras_face/training_cases.py``, where these arguments are tested on all frameworks.
    "case_central_storage_with_clipping_and_momentum": "torch",
    "case_clipnorm_is_of_the_global_gradient": "torch",
    "case_global_clipnorm_is_of_the_global_gradient": "torch",
    "case_gradient_accumulation_steps": "torch",
    "case_ema_overwrite_frequency": "torch",
    "case_infinity_on_one_replica_only": "torch",
    "case_mixed_precision_scales_the_loss_by_itself": "torch",
    # Rows are shared out before Keras receives them, and class weights become weights of examples.
    "case_class_weights": "torch",
    "case_shuffled_epochs_see_every_example_once": "torch",
    "case_batches_of_tf_data": "tensorflow",
    "case_batches_of_a_data_loader": "torch",
    "case_batches_of_a_generator": "torch",
    "case_predictions_of_batches_of_one_row": "torch",
    # Keras' callbacks and files; JAX differs most, as it has the weights elsewhere during an epoch.
    "case_callbacks_receive_global_metrics": "jax",
    "case_files_are_written_once_and_training_resumes": "jax",
    "case_saved_models_load_inside_and_outside_of_a_scope": "jax",
    "case_an_exported_model_serves_outside": "tensorflow",
    "case_checkpoints_of_tensorflow_restore_with_and_without_a_strategy": "tensorflow",
}


@on_frameworks(MODULE, ON_ONE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on_frameworks(LOOPS)
def test_custom_loops(case: str, job: Job) -> None:
    check_case(LOOPS, case, job)
