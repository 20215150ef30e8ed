"""Cases of the torch engine alone, on ranks that MPI did not start."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

import choros
from choros.comm import Reduction, global_process_set, topology
from choros.comm.engines.torch import TorchCommunicator
from choros.comm.engines.torch_devices import DeviceGroup
from choros.errors import ConfigError
from choros.topology import Topology
from comm.device_cases import CPU


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
        group = DeviceGroup(pair.communicator, CPU)
        tensor = torch.tensor([choros.rank()])
        group.allreduce(tensor, Reduction.SUM)
        assert tensor == 1
        group.close()
    assert choros.remove_process_set(pair)
