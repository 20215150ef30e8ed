"""TensorFlow's gradients in collectives on devices, through DLPack: on the CPU through Gloo, and without PyTorch."""

import pytest

from harness import Job, check_case, on

GLOO = Job(2, "tensorflow", (("CHOROS_ENGINE", "torch"), ("CHOROS_OVERLAP", "0")), name="gloo")
CASES = (
    "keras_face.device_tensor_cases::case_gradients_are_reduced_where_they_are",
    "keras_face.device_tensor_cases::case_weights_are_not_rounded_to_a_narrow_dtype",
    "keras_face.training_cases::case_adam_with_global_clipnorm_on_uneven_batches",
    "keras_face.training_cases::case_last_batch_smaller_than_the_number_of_ranks",
    "keras_face.training_cases::case_run_eagerly",
    "keras_face.training_cases::case_gradients_sent_during_the_backward_pass",
    "keras_face.training_cases::case_accumulation_reduces_once_per_update",
    "keras_face.training_cases::case_fp16_compression_is_close",
    "keras_face.sparse_cases::case_micro_batches",
    "keras_face.sparse_cases::case_ranks_with_different_numbers_of_batches",
)


@on(GLOO)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.partition("::case_")[2])
def test_two_ranks(case: str, job: Job) -> None:
    module, _, name = case.partition("::")
    check_case(module, name, job)


@on(Job(2, "tensorflow"))
@pytest.mark.parametrize("case", ["case_training_without_pytorch", "case_the_id_of_nccl_reaches_all_ranks"])
def test_two_ranks_of_mpi(case: str, job: Job) -> None:
    check_case("keras_face.device_tensor_cases", case, job)
