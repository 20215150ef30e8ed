"""Local SGD and DiLoCo on two real ranks; the cases are in ``local_sgd_cases.py``."""

from harness import Job, case_names, check_case, on_frameworks

MODULE = "keras_face.local_sgd_cases"
#: The cases that depend on the framework: on the location of weights during an epoch, and on how steps run.
CORE = (
    "case_averaging_at_every_step_equals_training_on_whole_batches",
    "case_ranks_with_different_numbers_of_batches",
    "case_each_of_several_steps_in_one_call_counts",
)
#: What has the worse accuracy by chance depends on the framework's random numbers.
ACCURACY = "case_digits_are_learned_as_well_as_with_synchronous_training"
ON_SOME = {case: "torch" for case in case_names(MODULE) if case not in CORE} | {
    ACCURACY: "jax",
    "case_ranks_with_different_numbers_of_batches": "torch jax",
}


@on_frameworks(MODULE, ON_SOME)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
