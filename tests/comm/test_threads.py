"""The threads engine: it ends when one of its ranks fails."""

import numpy as np
import pytest

from choros.comm import Communicator, Reduction, Request
from choros.comm.engines.threads import run_threads
from choros.errors import EngineError, MismatchError


def test_results_are_in_the_order_of_the_ranks() -> None:
    assert run_threads(lambda communicator: communicator.rank, 3) == [0, 1, 2]


@pytest.mark.parametrize("split", [False, True], ids=["all ranks", "a subset"])
def test_error_of_one_rank_releases_the_others_and_is_the_one_that_is_raised(split: bool) -> None:
    def meet(communicator: Communicator) -> Communicator:
        communicator.barrier()
        return communicator.split([0, 1]) if split else communicator

    def rank_main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            meet(communicator)
            raise ZeroDivisionError
        with pytest.raises(EngineError, match="another thread of this communicator has ended"):
            meet(communicator).barrier()

    with pytest.raises(ZeroDivisionError):
        run_threads(rank_main, 2)


def test_a_rank_that_is_interrupted_while_data_move_cannot_communicate() -> None:
    def rank_main(communicator: Communicator) -> None:
        def interrupted() -> None:
            communicator.agree(Request("ours"))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            communicator.atomic(interrupted)
        with pytest.raises(MismatchError, match=r"ours.* was interrupted on this rank, which cannot communicate"):
            communicator.barrier()

    run_threads(rank_main, 2)


def test_ranks_must_scale_in_the_same_way_where_results_have_an_array_too() -> None:
    def rank_main(communicator: Communicator) -> None:
        array = np.ones(3)
        with pytest.raises(MismatchError, match=r"rank 0: allreduce\(op=Sum, prescale_factor=1"):
            communicator.allreduce(array, Reduction.SUM, out=array, scaled=f"prescale_factor={communicator.rank + 1}")

    run_threads(rank_main, 2)
