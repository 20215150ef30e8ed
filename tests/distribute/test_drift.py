"""Replicas that must not drift apart, on two real ranks of each framework; the cases are in ``drift_cases.py``."""

from harness import Job, check_case, on_frameworks

MODULE = "distribute.drift_cases"


#: What a scope refuses, and what it reduces and gathers, does not depend on the framework.
ON_SOME = {
    "case_an_optimizer_made_outside_of_the_scope_sums_gradients": "torch tensorflow",
    "case_a_model_made_outside_of_the_scope_is_refused_if_replicas_differ": "torch tensorflow",
    "case_a_model_made_outside_of_the_scope_trains_if_replicas_agree": "torch jax",
    "case_compiled_modules_of_torch_with_sparse_gradients": "torch",
    "case_reductions_of_integers_over_several_axes_and_of_strings": "torch tensorflow",
}


@on_frameworks(MODULE, ON_SOME)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
