"""Models with a step of their own on two real ranks of each framework; the cases are in ``step_cases.py``."""

from harness import Job, check_case, on_frameworks

MODULE = "training.step_cases"
ON_SOME = {
    # Keras' trainer on JAX has the state of one optimizer.
    "case_two_optimizers_and_no_call": "torch tensorflow",
    # The others build a model before its first step themselves, and by its call.
    "case_no_call_and_unknown_shapes": "tensorflow",
    "case_no_call_and_unknown_shapes_eagerly": "tensorflow",
    "case_data_that_are_not_meant_for_call": "tensorflow",
}


@on_frameworks(MODULE, ON_SOME)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
