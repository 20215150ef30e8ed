"""Collectives on device tensors, for any control plane: on the CPU through Gloo, on GPUs through NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import choros
from choros.comm import Communicator, Reduction, global_process_set
from choros.comm.devices import Device, DeviceCollectives, nccl4py_problem
from choros.comm.engines import torch_devices
from choros.errors import ConfigError, EngineUnavailable, MismatchError
from choros.topology import shard_range

CPU = Device("cpu")


class DeviceGroup:
    """The collectives of a communicator's members on ``device``, which ``module`` connects."""

    def __init__(self, communicator: Communicator, module: str, device: Device) -> None:
        connect = importlib.import_module(f"choros.comm.engines.{module}").connect
        self._collectives = DeviceCollectives(communicator, [device.type], lambda used: connect(communicator, used))
        self.device = torch.device(str(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)


def cpu_group(communicator: Communicator) -> DeviceGroup:
    return DeviceGroup(communicator, "torch_devices", CPU)


def device_groups() -> Iterator[DeviceGroup]:
    """Groups of all ranks: of the CPU, and by both libraries of GPUs if there are enough, or if NCCL shares them."""
    ways = [("torch_devices", CPU)]
    cards = torch.cuda.device_count()
    if cards and (
        cards >= choros.local_size() or torch.distributed.ProcessGroupNCCL.get_runtime_nccl_version() >= (2, 30)
    ):
        device = Device("cuda", choros.local_rank() % cards)
        ways.append(("torch_devices", device))
        if not nccl4py_problem():
            ways.append(("nccl4py_devices", device))
    communicator = global_process_set.communicator
    for module, device in ways:
        group = DeviceGroup(communicator, module, device)
        yield group
        group.close()


def on_each_device(body: Callable[[DeviceGroup], None]) -> Callable[[], None]:
    def case() -> None:
        for group in device_groups():
            body(group)

    return case


def case_unsupported_device_is_an_error_on_all_ranks() -> None:
    with pytest.raises(EngineUnavailable, match="tensors on meta cannot be communicated without a copy"):
        torch_devices.connect(global_process_set.communicator, Device("meta"))
    mine = Device("meta") if choros.rank() == 0 else CPU
    with pytest.raises(EngineUnavailable if choros.rank() == 0 else MismatchError, match="tensors on meta"):
        torch_devices.connect(global_process_set.communicator, mine)


@on_each_device
def case_device_group_reduces_in_place(group: DeviceGroup) -> None:
    of_all = [(torch.arange(6).reshape(2, 3) + 3 * rank) % 4 - 1 for rank in range(choros.size())]
    stacked = torch.stack(of_all).to(group.device, torch.float64)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        for op, expected in {
            Reduction.SUM: stacked.sum(0),
            Reduction.MIN: stacked.amin(0),
            Reduction.MAX: stacked.amax(0),
            Reduction.PRODUCT: stacked.prod(0),
            Reduction.AVERAGE: stacked.mean(0),
        }.items():
            tensor = of_all[choros.rank()].to(group.device, dtype, copy=True)
            group.allreduce(tensor, op)
            # An integer average rounds towards zero, as the conversion does.
            torch.testing.assert_close(tensor, expected.to(dtype))


@on_each_device
def case_device_group_accepts_booleans_and_tensors_with_gradients(group: DeviceGroup) -> None:
    mine = torch.tensor([choros.rank() == 0, True], device=group.device)
    group.allreduce(mine, Reduction.MIN)
    assert mine.tolist() == [choros.size() == 1, True]
    weight = torch.nn.Parameter(torch.full((3,), float(choros.rank()), device=group.device))
    group.broadcast(weight, choros.size() - 1)
    assert weight.tolist() == [choros.size() - 1.0] * 3
    group.allreduce(weight, Reduction.SUM)
    assert weight.tolist() == [choros.size() * (choros.size() - 1.0)] * 3
    group.allreduce(torch.empty(0, device=group.device))


@on_each_device
def case_device_group_concatenates_rows_of_which_some_ranks_have_none(group: DeviceGroup) -> None:
    def rows(rank: int, count: int) -> torch.Tensor:
        return torch.full((count, 2), rank, dtype=torch.bfloat16, device=group.device)

    for parts in (
        [rows(rank, 2) for rank in range(choros.size())],
        [rows(rank, rank) for rank in range(choros.size())],
    ):
        torch.testing.assert_close(group.allgather(parts[choros.rank()]), torch.cat(parts))
    assert group.allgather(torch.tensor(choros.rank(), device=group.device)).tolist() == list(range(choros.size()))


@on_each_device
def case_device_group_detects_mismatches(group: DeviceGroup) -> None:
    last = choros.rank() == choros.size() - 1

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, device=group.device).to(dtype)

    with pytest.raises(MismatchError, match=r"device allreduce\(op=Average, dtype=torch.float32, shape=\(4,\)\)"):
        group.allreduce(ones(4 if last else 3))
    with pytest.raises(ConfigError if last else MismatchError, match="not contiguous"):
        group.allreduce(ones(2, 2).T if last else ones(2, 2))
    for text, collective in {
        "complex64 cannot": lambda: group.allreduce(ones(2, dtype=torch.complex64)),
        "bits8 cannot": lambda: group.allreduce(torch.empty(2, dtype=torch.bits8, device=group.device)),
        "booleans have no average": lambda: group.allreduce(ones(2, dtype=torch.bool)),
        "root=9 is not": lambda: group.broadcast(ones(2), 9),
    }.items():
        with pytest.raises(ConfigError, match=text):
            collective()
    with pytest.raises(EngineUnavailable, match="tensors on meta cannot be communicated"):
        group.allgather(torch.ones(2, device="meta"))
    with pytest.raises(ConfigError, match="a scalar has no rows to scatter"):
        group.reducescatter(torch.tensor(1.0, device=group.device))
    with pytest.raises(ConfigError if last else MismatchError, match=r"splits=\[9\] must be"):
        group.alltoall(ones(2), [9] if last else [0] * choros.size())
    tensor = ones(1)
    group.allreduce(tensor, Reduction.SUM)
    assert tensor == choros.size()


@on_each_device
def case_device_group_scatters_reduced_rows(group: DeviceGroup) -> None:
    rank, size = choros.rank(), choros.size()
    stacked = torch.stack([(torch.arange(14).reshape(7, 2) * 3 + other) % 5 + 1 for other in range(size)])
    start, stop = shard_range(7, rank, size)
    for dtype in (torch.float32, torch.float16, torch.int64):
        for op, expected in {
            Reduction.SUM: stacked.sum(0),
            Reduction.MIN: stacked.amin(0),
            Reduction.MAX: stacked.amax(0),
            Reduction.PRODUCT: stacked.prod(0),
            Reduction.AVERAGE: stacked.double().mean(0),
        }.items():
            got = group.reducescatter(stacked[rank].to(group.device, dtype), op)
            torch.testing.assert_close(got, expected[start:stop].to(group.device, dtype))
    truth = torch.tensor([[other == rank] for other in range(size)], device=group.device)
    assert group.reducescatter(truth, Reduction.SUM).tolist() == [[True]]
    assert group.reducescatter(truth, Reduction.MIN).tolist() == [[size == 1]]


@on_each_device
def case_device_group_sends_rows_to_every_rank(group: DeviceGroup) -> None:
    rank, size = choros.rank(), choros.size()
    mine = torch.full((2 * size, 3), float(rank), device=group.device)
    received, counts = group.alltoall(mine)
    assert counts == [2] * size
    assert received[:, 0].tolist() == [float(other) for other in range(size) for _ in range(2)]
    received, counts = group.alltoall(mine, list(range(size)))
    assert counts == [rank] * size
    assert received.shape == (rank * size, 3)


def case_devices_belong_to_the_communicator() -> None:
    communicator = global_process_set.communicator
    devices = communicator.devices
    assert isinstance(devices, DeviceCollectives)
    assert communicator.devices is devices
    assert devices.moves("cuda")
    assert devices.moves("cpu") == (communicator.engine == "torch")
    by_nccl4py = communicator.engine == "mpi" and not nccl4py_problem()
    tensor = torch.full((2,), float(choros.rank()), device="cuda" if by_nccl4py else "cpu")
    devices.allreduce(tensor, Reduction.MAX)
    assert tensor.tolist() == [choros.size() - 1.0] * 2
    devices.broadcast(tensor, 0)
    if by_nccl4py:
        with pytest.raises(EngineUnavailable, match="tensors on cpu cannot be communicated by nccl4py"):
            devices.allgather(np.ones(1))
        return
    rows = np.full((1, 2), choros.rank(), np.float32)  # not torch's, but with DLPack's protocol
    assert devices.allgather(rows)[:, 0].tolist() == list(range(choros.size()))
    assert devices.reducescatter(np.ones(choros.size(), np.float32), Reduction.SUM).tolist() == [choros.size()]
    assert devices.alltoall(np.arange(choros.size()))[0].tolist() == [choros.rank()] * choros.size()
    with pytest.raises(ConfigError, match="ndarray: only torch's tensors can be overwritten in place"):
        devices.allreduce(rows)
