"""Joining and leaving a job, and its process sets; on three real ranks of one host."""

from __future__ import annotations

import os
import socket
import sys

import numpy as np
import psutil
import pytest

import choros
from choros.comm import Reduction, registered_process_sets, topology
from choros.errors import ConfigError, EngineError, MismatchError, NotInitializedError
from choros.topology import Topology
from choros.transport.address import LOOPBACK, outward_address

LAUNCHER = "Open MPI's mpirun"


def total(process_set: choros.ProcessSet = choros.global_process_set) -> int:
    """The sum of the members' global ranks."""
    return int(process_set.communicator.allreduce(choros.rank(), Reduction.SUM))


def case_ranks_know_their_position() -> None:
    position = Topology.from_hosts(["here"] * 3, choros.rank(), launcher=LAUNCHER)
    assert topology() == position
    assert (choros.rank(), choros.size()) == (position.rank, 3)
    assert (choros.local_rank(), choros.local_size()) == (position.rank, 3)
    assert (choros.cross_rank(), choros.cross_size(), choros.is_homogeneous()) == (0, 1, True)
    assert choros.global_process_set.communicator.allgather([choros.rank()]).tolist() == [0, 1, 2]


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=0.5).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system can restrict sockets")
def case_a_job_on_one_host_does_not_listen_for_others() -> None:
    """MPI in this rank listens nowhere. Nobody connects to mpirun, neither from other hosts nor from this one."""
    wrapper = psutil.Process(os.getppid())
    own, mpirun = (
        {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        for process in (psutil.Process(), wrapper.parent())
    )
    assert not own
    assert mpirun
    for address in {outward_address(), LOOPBACK}:
        assert not [port for port in mpirun if can_connect(address, port)]


def case_init_a_second_time_changes_nothing() -> None:
    communicator = choros.global_process_set.communicator
    choros.init()
    choros.init(process_sets=[[0, 1, 2]])
    assert choros.global_process_set.communicator is communicator
    with pytest.raises(ConfigError, match=r"initialised already, without a process set of the ranks \[0\]"):
        choros.init(process_sets=[[0]])


def case_init_after_one_that_failed_joins_the_job() -> None:
    choros.shutdown()
    with pytest.raises(ConfigError, match="distinct ranks"):
        choros.init(process_sets=[[0, 1], [0, 3]])
    assert not choros.is_initialized()
    pair = choros.ProcessSet([0, 1])
    choros.init(process_sets=[pair])
    assert (pair.included(), total()) == (choros.rank() < 2, 3)
    assert choros.remove_process_set(pair)


def case_a_collective_of_a_communicator_from_before_shutdown_is_an_error() -> None:
    kept = choros.global_process_set.communicator
    choros.shutdown()
    choros.init()
    with pytest.raises(EngineError, match=r"shutdown\(\) has parted"):
        kept.allreduce([1.0])
    assert total() == 3


def case_a_job_can_be_left_and_joined_many_times() -> None:
    for _ in range(30):
        choros.shutdown()
        assert not choros.is_initialized()
        with pytest.raises(NotInitializedError):
            total()
        choros.init()
        assert total() == 3


def case_only_members_of_a_process_set_can_use_it() -> None:
    pair = choros.add_process_set([2, 0])
    member = choros.rank() != 1
    assert (pair.ranks, pair.size(), pair.included()) == ([0, 2], 2, member)
    assert pair.rank() == {0: 0, 1: None, 2: 1}[choros.rank()]
    if member:
        assert total(pair) == 2
    else:
        with pytest.raises(ConfigError, match=r"this rank is not in ProcessSet\(.*ranks=\[0, 2\], mpi_comm=None\)"):
            total(pair)
    assert choros.remove_process_set(pair)


def case_a_removed_set_cannot_be_used_but_added_again() -> None:
    own = choros.ProcessSet([0, 1])
    for _ in range(3):
        assert choros.add_process_set(own) is own
        assert own.process_set_id is not None
        assert choros.remove_process_set(own)
        assert (own.process_set_id, own.included(), own.size(), own.rank()) == (None, None, None, None)
        with pytest.raises(ConfigError, match=r"ranks \[0, 1\] is not registered"):
            total(own)
    assert not choros.remove_process_set(own)
    assert not choros.remove_process_set(choros.global_process_set)


def case_a_second_set_of_the_same_ranks_is_an_error() -> None:
    pair = choros.add_process_set([0, 1])
    for ranks in ([1, 0], [2, 1, 0]):
        with pytest.raises(ConfigError, match="has the same ranks already"):
            choros.add_process_set(ranks)
    assert choros.remove_process_set(pair)


def case_invalid_process_sets_are_errors() -> None:
    for ranks in ([], [0, 3]):
        with pytest.raises(ConfigError, match=r"not distinct ranks of 0 … 2"):
            choros.add_process_set(ranks)


def case_process_sets_of_any_iterable() -> None:
    for ranks in (range(2), {1, 0}, np.arange(2), (rank for rank in (1, 0)), choros.ProcessSet(range(2))):
        pair = choros.add_process_set(ranks)
        assert (pair.ranks, pair.included()) == ([0, 1], choros.rank() < 2)
        assert choros.remove_process_set(pair)
    for given in (["0", "1"], [0.5], None, 3):
        with pytest.raises(ConfigError, match="expected ranks, or an mpi4py communicator"):
            choros.ProcessSet(given)


def case_process_sets_of_mpi_communicators() -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    rank = choros.rank()
    mine = choros.ProcessSet(MPI.COMM_WORLD.Split(rank % 2, rank))
    assert mine.ranks == ([1] if rank == 1 else [0, 2])
    pair = choros.ProcessSet([0, 1])
    choros.shutdown()
    choros.init(process_sets=[mine, pair])
    assert (mine.process_set_id, pair.process_set_id) == (2 if rank == 1 else 1, 3)
    assert total(mine) == (1 if rank == 1 else 2)
    assert {number: each.ranks for number, each in registered_process_sets().items()} == {
        0: [0, 1, 2],
        1: [0, 2],
        2: [1],
        3: [0, 1],
    }
    assert str(pair) == "ProcessSet(process_set_id=3, ranks=[0, 1], mpi_comm=None)"
    choros.shutdown()
    choros.init()
    with pytest.raises(ConfigError, match="that this rank is in"):
        choros.ProcessSet(MPI.COMM_NULL)


def case_ranks_that_add_different_sets_mismatch() -> None:
    with pytest.raises(MismatchError, match=r"split\(ranks=\[2\]\)"):
        choros.add_process_set([2] if choros.rank() == 2 else [0, 1])
    assert total() == 3


def case_collectives_of_overlapping_sets_can_alternate() -> None:
    low, high = choros.add_process_set([0, 1]), choros.add_process_set([1, 2])
    for _ in range(20):
        if low.included():
            assert total(low) == 1
        assert total() == 3
        if high.included():
            assert total(high) == 3
    assert choros.remove_process_set(low)
    assert choros.remove_process_set(high)


def case_disjoint_sets_are_independent() -> None:
    pair, single = choros.add_process_set([0, 1]), choros.add_process_set([2])
    for _ in range(20 if choros.rank() == 2 else 3):
        assert total(single if choros.rank() == 2 else pair) == (2 if choros.rank() == 2 else 1)
    assert choros.remove_process_set(single)
    assert choros.remove_process_set(pair)


def case_init_registers_sets_and_shutdown_forgets_them() -> None:
    pair = choros.ProcessSet([0, 1])
    choros.shutdown()
    choros.init(process_sets=[pair, [2]])
    assert (pair.process_set_id, pair.included()) == (1, choros.rank() < 2)
    choros.shutdown()
    assert pair.process_set_id is None
    choros.init(process_sets="dynamic")
    assert choros.remove_process_set(choros.add_process_set([0, 1]))


def case_init_of_some_ranks_renumbers_them() -> None:
    rank = choros.rank()
    choros.shutdown()
    if rank == 0:
        with pytest.raises(ConfigError, match=r"init\(comm=\[1, 2\]\) was called on rank 0"):
            choros.init(comm=[1, 2])
    else:
        choros.init(comm={1, 2})
        assert topology() == Topology.from_hosts(["here"] * 2, rank - 1, launcher=LAUNCHER)
        assert total() == 1
        second = choros.add_process_set([1])
        assert second.included() == (choros.rank() == 1)
        choros.shutdown()
    choros.init()


def case_init_accepts_a_communicator_of_mpi4py() -> None:
    from mpi4py import MPI

    rank = choros.rank()
    choros.shutdown()
    part = MPI.COMM_WORLD.Split(color=int(rank == 1), key=-rank)
    choros.init(comm=part)
    assert (choros.rank(), choros.size()) == {0: (1, 2), 1: (0, 1), 2: (0, 2)}[rank]
    assert total() == sum(range(choros.size()))
    choros.shutdown()
    part.Free()
    choros.init()
