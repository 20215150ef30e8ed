import numpy as np
import pytest

from choros.comm import ProcessSet
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.threads import run_threads
from choros.errors import MismatchError
from choros.parallel import ops
from choros.parallel.compression import Compression
from harness import FRAMEWORKS, Job, check_case, on

OPS = "parallel.ops_cases"


@on(Job(2), *(Job(2, framework) for framework in FRAMEWORKS), cases=OPS)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(OPS, case, job)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_an_average_in_which_a_rank_is_lost_is_that_of_the_others(dtype, compression, monkeypatch):
    communicator = LocalCommunicator(0, ["here"] * 4)  # of four ranks with equal values
    settled = iter([False])

    def lose() -> None:
        communicator.launched, communicator.size = (0, 1, 2), 3

    monkeypatch.setattr(communicator, "elastic", True)
    monkeypatch.setattr(communicator, "_settle", lambda completed: next(settled, True))
    monkeypatch.setattr(communicator, "_recover", lose)
    process_set = ProcessSet(range(4))
    process_set.register(0, range(4), communicator)
    mean = ops.allreduce(np.ones(2, dtype), compression=compression, process_set=process_set)
    assert communicator.size == 3
    np.testing.assert_allclose(mean, 1.0, rtol=1e-3)


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize("collective", ["allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"])
def test_factors_that_differ_mismatch(collective, factor):
    def call(communicator) -> None:
        process_set = ProcessSet(communicator.ranks)
        process_set.register(0, communicator.ranks, communicator)
        array = np.ones(2)
        given = {factor: 2.0 if communicator.rank else 0.5, "process_set": process_set}
        with pytest.raises(MismatchError, match=rf"rank 0: .*{factor}=0\.5, .*\n.*rank 1: .*{factor}=2\.0, "):
            getattr(ops, collective)([array] if "grouped" in collective else array, **given)

    run_threads(call, 2)
