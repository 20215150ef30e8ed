"""Training on GPUs, by ``make test-gpu``: two ranks, which share a card if there is only one.

Only the frameworks that are installed with support for GPUs are tested, and on TensorFlow and PyTorch both libraries
that move gradients between GPUs: nccl4py, with which TensorFlow needs no PyTorch, and torch.distributed. The cases are
those of the whole suite, which run on GPUs wherever there are some; ``gpu_cases.py`` checks that they do.
"""

import subprocess
import sys
from functools import cache

import pytest

from choros.comm.devices import nccl4py_problem
from choros.launch.driver.machine import count_accelerators
from harness import Job, case_names, check_case, on

pytestmark = [
    pytest.mark.skipif(not count_accelerators(), reason="this machine has no GPU"),
    pytest.mark.slow,
]

#: Asks each framework, in a process of its own, whether it sees a GPU.
SEES_A_GPU = {
    "tensorflow": "import tensorflow as tf; assert tf.config.list_physical_devices('GPU')",
    "torch": "import torch; assert torch.cuda.is_available()",
    "jax": "import jax; assert jax.default_backend() == 'gpu'",
}
#: Two ranks may share the memory of one card.
ENVIRON = (
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ("TF_FORCE_GPU_ALLOW_GROWTH", "true"),
    ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3"),
)
NCCL4PY, TORCH = ((*ENVIRON, ("CHOROS_DEVICES", library)) for library in ("nccl4py", "torch"))
JOBS = (
    Job(2, "tensorflow", NCCL4PY, hidden=("torch",), anew=True, name="gpu-nccl4py"),
    Job(2, "tensorflow", TORCH, anew=True, name="gpu-torch"),
    Job(2, "torch", NCCL4PY, anew=True, name="gpu-nccl4py"),
    Job(2, "torch", TORCH, anew=True, name="gpu-torch"),
    Job(2, "jax", ENVIRON, anew=True, name="gpu"),
)
TRANSPARENT = (
    "case_sgd_with_momentum_on_uneven_batches",
    "case_adam_with_global_clipnorm_on_uneven_batches",
    "case_last_batch_smaller_than_the_number_of_ranks",
    "case_ranks_with_different_numbers_of_batches",
)


@cache
def sees_a_gpu(framework: str) -> bool:
    return subprocess.run([sys.executable, "-c", SEES_A_GPU[framework]], capture_output=True).returncode == 0


def check(module: str, case: str, job: Job) -> None:
    library = dict(job.environ).get("CHOROS_DEVICES")
    if library == "nccl4py" and (problem := nccl4py_problem()):
        pytest.skip(problem)
    for framework in {job.framework, "torch"} if library == "torch" else {job.framework}:
        if not sees_a_gpu(framework):
            pytest.skip(f"{framework} is not installed with support for this machine's GPUs")
    check_case(module, case, job)


@on(*JOBS, cases="gpu.gpu_cases")
def test_on_the_gpu(case: str, job: Job) -> None:
    check("gpu.gpu_cases", case, job)


@on(*JOBS)
@pytest.mark.parametrize("case", TRANSPARENT)
def test_equals_one_process(case: str, job: Job) -> None:
    check("keras_face.training_cases", case, job)


@pytest.mark.parametrize("case", case_names("comm.device_cases"))
def test_collectives_on_devices(case: str) -> None:
    check("comm.device_cases", case, Job(2, "torch", ENVIRON, anew=True, name="gpu"))
