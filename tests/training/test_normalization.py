"""Synchronised batch normalisation on two real ranks of each framework, and on three."""

from harness import Job, check_case, on_frameworks

MODULE = "training.normalization_cases"
#: Cases that not every framework runs: their mathematics is that of fit and of custom loops, which do.
ON_SOME = {
    "case_fit_with_accumulation_and_a_sum": "torch tensorflow",
    "case_masked_sequences_and_renormalization": "torch tensorflow",
    "case_other_axis_and_frozen_layer": "torch",
    "case_gradients_that_are_summed": "torch",
    "case_own_train_step": "torch jax",
    # The exchange is that of fit; Horovod's face and saved layers differ from a strategy's in Python alone.
    "case_horovods_face": "torch tensorflow",
    "case_layers_outside_of_steps_and_saved_ones": "torch tensorflow",
    # Keras accepts synchronized=True on TensorFlow only, which alone builds such a model in its first step.
    "case_a_layer_that_the_first_batch_creates": "tensorflow",
}
#: The cases of three ranks, on one framework.
CORE = ("case_fit", "case_masked_sequences_and_renormalization", "case_custom_loop", "case_horovods_face")


@on_frameworks(MODULE, ON_SOME, CORE)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
