"""Connections of devices by ``torch.distributed``: of GPUs through NCCL or RCCL, of the CPU through Gloo."""

import functools
from collections.abc import Sequence
from typing import Any, final

import torch  # noqa: TID253  (imported where the user has it)
import torch.distributed as dist  # noqa: TID253

from choros.comm.communicator import Communicator
from choros.comm.devices import Device, DeviceLink, agree_to_connect, as_tensor, connection_error, share_cards
from choros.comm.engines.torch import (
    FOREVER,
    TorchCommunicator,
    allreduce_options,
    broadcast_options,
    gloo_group,
    start_allgather,
    wait_on_host,
)
from choros.comm.reduction import Reduction
from choros.comm.store import exchange_locations, peers_of, store_over, translated
from choros.errors import EngineUnavailable
from choros.settings import current
from choros.transport.address import own_address


def connect(control: Communicator, device: Device) -> DeviceLink:
    """Connects the members' devices; all call it. Ranks on one card need NCCL 2.30, which is configured to let them."""
    problem = None
    if device.type not in ("cuda", "cpu"):
        problem = EngineUnavailable(
            f"tensors on {device.type} cannot be communicated without a copy: only those on cuda and on cpu can."
        )
    elif device.type == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        problem = EngineUnavailable(f"tensors on {device} need a GPU and a PyTorch that was built with NCCL.")
    agree_to_connect(control, device, "torch.distributed", problem)
    return _TorchLink(control, device)


@final
class _TorchLink(DeviceLink):
    """A private process group; on the CPU, where Gloo moves the bytes, a call returns when they have arrived."""

    def __init__(self, control: Communicator, device: Device) -> None:
        seconds = current().start_timeout
        if isinstance(control, TorchCommunicator):
            (store, _), address, peers, waits = control.branch(), control.address, control.peers, control.waits
        else:
            store, _, address = store_over(control, seconds)
            peers, waits = peers_of(store), (tuple(range(control.size)), lambda: "a collective on devices")
        self._check = functools.partial(peers.check, *waits)
        self._explaining = functools.partial(peers.explaining, *waits)
        self._store = store  # kept alive: NCCL uses it again when it ends
        self._rank = control.rank
        self._on_gpu = device.type == "cuda"
        self._device = torch.device("cuda", device.index) if self._on_gpu else torch.device("cpu")
        self._library = "NCCL" if self._on_gpu else "Gloo"
        if self._on_gpu:
            self._group = _nccl_group(store, control, self._device)
        else:
            locations = exchange_locations(store, control.rank, control.size, address, seconds)
            address = own_address(locations, control.rank)
            self._group = gloo_group(store, control.rank, control.size, address, seconds, self._check)

    def allreduce(self, buffer: Any, op: Reduction) -> None:
        tensor = as_tensor(buffer)
        with self._explaining(), translated("allreduce", self._library):
            self._finish(self._group.allreduce([tensor], allreduce_options(op)))
        if self._on_gpu and tensor is not buffer:
            torch.cuda.current_stream(self._device).synchronize()

    def broadcast(self, tensor: Any, root: int) -> None:
        with self._explaining(), translated("broadcast", self._library):
            self._finish(self._group.broadcast([tensor], broadcast_options(root)))

    def allgatherv(self, tensor: Any, received: Any, counts: Sequence[int]) -> None:
        with self._explaining(), translated("allgather", self._library):
            for work in start_allgather(self._group, tensor, received, counts, self._rank):
                self._finish(work)

    def alltoallv(self, tensor: Any, received: Any, send: Sequence[int], receive: Sequence[int]) -> None:
        with self._explaining(), translated("alltoall", self._library):
            self._finish(self._group.alltoall_base(received, tensor, list(receive), list(send)))

    def close(self) -> None:
        if self._on_gpu:
            self._group.shutdown()
        del self._group, self._store

    def _finish(self, work: Any) -> None:
        if self._on_gpu:
            work.wait()  # orders the current stream behind it
        else:
            wait_on_host(work, self._check)


def _nccl_group(store: dist.Store, control: Communicator, device: torch.device) -> Any:
    version = tuple(dist.ProcessGroupNCCL.get_runtime_nccl_version())  # torch.cuda.nccl.version() is that of its build
    share_cards(control, str(torch.cuda.get_device_properties(device).uuid), version)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    try:
        group = dist.ProcessGroupNCCL(store, control.rank, control.size, options)
        # NCCL connects ranks in their first collective: run one here, to raise its errors here.
        group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise connection_error(version, error) from error
    return group
