"""Connections of NVIDIA's GPUs by nccl4py, NVIDIA's bindings of NCCL: of any framework's tensors, without PyTorch."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

from cuda.core import Device as Gpu
from nccl import core

from choros.comm.communicator import Communicator, bytes_of_first
from choros.comm.devices import Device, DeviceLink, agree_to_connect, connection_error, share_cards
from choros.comm.reduction import Reduction
from choros.errors import ChorosError, EngineError, EngineUnavailable

_OPS = {Reduction.SUM: core.SUM, Reduction.MIN: core.MIN, Reduction.MAX: core.MAX, Reduction.PRODUCT: core.PROD}


def connect(control: Communicator, device: Device) -> DeviceLink:
    """Connects the members' GPUs, of which ``device`` is this rank's; all members must call it::

    rank 0                                              rank 1
    ── same kind of device, same library? ────────────────────────   control plane: agree
    ── names of the cards: is one shared? ────────────────────────   control plane: allgather
    id = get_unique_id()
    ── id ────────────────────────────────────────────► id           control plane: broadcast
    Communicator.init(2, 0, id) ◄────── NCCL ─────────► Communicator.init(2, 1, id)
    """
    problem = None
    if device.type != "cuda":
        problem = EngineUnavailable(
            f"tensors on {device.type} cannot be communicated by nccl4py, only those on NVIDIA's GPUs can: call the "
            "communicator's own collectives, which pass host memory."
        )
    agree_to_connect(control, device, "nccl4py", problem)
    return _NcclLink(control, device)


@final
class _NcclLink(DeviceLink):
    """A communicator of NCCL's, in torch's current stream for torch's tensors, in one of its own for others."""

    def __init__(self, control: Communicator, device: Device) -> None:
        self._rank = control.rank
        self._index = device.index
        library = core.get_version().libnccl
        version = library.version.release if library is not None else ()
        with self._current() as gpu:
            share_cards(control, gpu.uuid, version)
            made = bytes_of_first(control, lambda: core.get_unique_id().as_bytes, "the start of NCCL")
            unique = core.UniqueId.from_bytes(made)
            try:
                self._communicator = core.Communicator.init(control.size, control.rank, unique)
            except Exception as error:
                raise connection_error(version, error) from error
            self._stream = gpu.create_stream()

    def allreduce(self, buffer: Any, op: Reduction) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(buffer, torch.Tensor):
            if buffer.numel():
                with _translated("allreduce"):
                    self._communicator.allreduce(buffer, buffer, _OPS[op], stream=_current_stream(buffer))
            return
        with self._current(), _translated("allreduce"):
            self._communicator.allreduce(buffer, buffer, _OPS[op], stream=self._stream)
            self._stream.sync()

    def broadcast(self, tensor: Any, root: int) -> None:
        if tensor.numel():
            with _translated("broadcast"):
                self._communicator.broadcast(tensor, tensor, root, stream=_current_stream(tensor))

    def allgatherv(self, tensor: Any, received: Any, counts: Sequence[int]) -> None:
        stream = _current_stream(tensor)
        with _translated("allgather"):
            if len(set(counts)) == 1:
                if counts[0]:
                    self._communicator.allgather(tensor, received, stream=stream)
                return
            with core.group():
                for root, part in enumerate(received.split(list(counts))):
                    if part.numel():
                        own = tensor if root == self._rank else part
                        self._communicator.broadcast(own, part, root, stream=stream)

    def alltoallv(self, tensor: Any, received: Any, send: Sequence[int], receive: Sequence[int]) -> None:
        stream = _current_stream(tensor)
        with _translated("alltoall"), core.group():
            for peer, (to, back) in enumerate(
                zip(tensor.split(list(send)), received.split(list(receive)), strict=True)
            ):
                if to.numel():
                    self._communicator.send(to, peer, stream=stream)
                if back.numel():
                    self._communicator.recv(back, peer, stream=stream)

    def close(self) -> None:
        with self._current():
            self._communicator.finalize()
            self._communicator.destroy()
            self._stream.close()

    @contextmanager
    def _current(self) -> Iterator[Gpu]:
        """A context in which the GPU is the thread's current one. torch relies on its own; TensorFlow sets its own."""
        torch = sys.modules.get("torch")
        with torch.cuda.device(self._index) if torch is not None and torch.cuda.is_initialized() else nullcontext():
            gpu = Gpu(self._index)
            gpu.set_current()
            yield gpu


def _current_stream(tensor: Any) -> int:
    import torch

    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """A context that raises errors of NCCL and its bindings as ``EngineError``."""
    try:
        yield
    except ChorosError:
        raise
    except Exception as error:
        raise EngineError(f"NCCL failed in {what}: {error}") from error
