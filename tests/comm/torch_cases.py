"""Cases of the torch engine alone, on ranks that MPI did not start."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import choros
from choros.comm import Reduction, global_process_set, topology
from choros.comm.engines.torch import TorchCommunicator
from choros.errors import ConfigError, EngineError
from choros.parallel.objects import allgather_object, broadcast_object
from choros.topology import Topology
from choros.transport.secret import Signatures
from comm.device_cases import cpu_group


def total() -> int:
    return int(global_process_set.communicator.allreduce(1, Reduction.SUM))


# ── starting ─────────────────────────────────────────────────────────────────────────────────────


def case_ranks_on_one_host_listen_on_loopback() -> None:
    assert topology() == Topology.from_hosts(["here"] * choros.size(), choros.rank(), launcher="torchrun")
    assert global_process_set.communicator.address == "127.0.0.1"


def case_neither_mpi_nor_the_default_group_is_touched() -> None:
    assert isinstance(global_process_set.communicator, TorchCommunicator)
    assert "mpi4py" not in sys.modules
    assert not dist.is_initialized()


def case_the_default_group_is_available_to_the_user() -> None:
    dist.init_process_group("gloo")
    values = torch.ones(2)
    dist.all_reduce(values)
    assert total() == values[0] == choros.size()
    dist.destroy_process_group()


def case_init_of_some_ranks_renumbers_them() -> None:
    rank, size = choros.rank(), choros.size()
    choros.shutdown()
    if rank == 0:
        with pytest.raises(ConfigError, match=r"init\(comm=\[1, 2\]\) was called on rank 0"):
            choros.init(comm=[1, 2])
    else:
        choros.init(comm=[1, 2])
        assert topology() == Topology.from_hosts(["here"] * 2, rank - 1, launcher="torchrun")
        assert total() == 2
        choros.shutdown()
    choros.init()
    assert total() == size


def case_device_group_of_a_process_set() -> None:
    pair = choros.add_process_set([0, 1])
    if pair.included():
        group = cpu_group(pair.communicator)
        tensor = torch.tensor([choros.rank()])
        group.allreduce(tensor, Reduction.SUM)
        assert tensor == 1
        group.close()
    assert choros.remove_process_set(pair)


# ── objects ──────────────────────────────────────────────────────────────────────────────────────

ran: list[str] = []


def run_code() -> None:
    ran.append("code of someone else")


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return run_code, ()


def case_an_object_that_no_rank_has_signed_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sends it as a process does that has taken rank 1's connections."""
    forges = choros.rank() == 1
    with monkeypatch.context() as patch:
        if forges:
            patch.setattr(global_process_set.communicator, "signatures", Signatures(b"another key"))
        with pytest.raises(EngineError, match=r"an object was not sent by rank [01]"):
            allgather_object(Harmful() if forges else "mine")
        with nullcontext() if forges else pytest.raises(EngineError, match="an object was not sent by rank 1"):
            broadcast_object(Harmful(), root_rank=1)
    assert not ran
    assert allgather_object(choros.rank()) == list(range(choros.size()))
    assert broadcast_object("sent" if choros.rank() == 0 else None) == "sent"
