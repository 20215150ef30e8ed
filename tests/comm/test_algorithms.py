"""Algorithms of the mpi engine, on real ranks; the conformance suite runs on top of them as well."""

import itertools

import pytest

from choros.comm.engines.mpi_tuning import best
from choros.comm.engines.mpi_window import HostRanks
from harness import Job, case_names, check_case, on

MODULE = "comm.algorithm_cases"
#: Cases whose cost grows with the number of ranks; three ranks would show the same as two.
HEAVY = ("case_memory_does_not_grow", "case_a_gibibyte")


@on(Job(2), Job(3))
@pytest.mark.parametrize("case", [name for name in case_names(MODULE) if name not in HEAVY])
def test_algorithm(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.slow
@on(Job(2))
@pytest.mark.parametrize("case", HEAVY)
def test_heavy_case(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


def test_ranks_of_hosts_keep_the_order_of_the_hosts() -> None:
    assert HostRanks.of([0, 1, 0, 3]) == HostRanks((2, 1, 1))


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2), (3, 1), (2, 5, 3)])
@pytest.mark.parametrize("items", [0, 1, 5, 100])
def test_slices_cover_a_buffer_on_every_host(sizes: tuple[int, ...], items: int) -> None:
    ranks = HostRanks(sizes)
    for host in sizes:
        slices = [ranks.slice_of(rank, items) for rank in range(host)]
        assert slices[0][0] == 0
        assert slices[-1][1] == items
        assert all(before[1] == after[0] for before, after in itertools.pairwise(slices))
        assert sum(stop > start for start, stop in slices) <= ranks.slices


def test_best_is_the_fastest_on_the_slowest_rank() -> None:
    assert best(["a", "b", "c"], [[3.0, 1.0, 2.5], [1.0, 9.0, 2.0]]) == "c"
