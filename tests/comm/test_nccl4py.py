"""The connection of GPUs by nccl4py, without a GPU: what it calls, in which order, and whether nccl4py has it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from choros.comm import Communicator, Reduction
from choros.comm.devices import Device, nccl4py_problem, share_cards
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.threads import run_threads
from choros.errors import EngineError, EngineUnavailable
from harness import needs

MODULE = "choros.comm.engines.nccl4py_devices"
TORCH_STREAM = 7


class Recorder:
    """NCCL and CUDA, as nccl4py and cuda.core show them: notes what is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: Exception | None = None
        self.stream: Any = None

    def modules(self) -> dict[str, ModuleType]:
        recorder = self

        class Communicator:
            @classmethod
            def init(cls, nranks: int, rank: int, unique_id: bytes) -> Communicator:
                recorder.note("init", nranks, rank, unique_id)
                if recorder.fails is not None:
                    raise recorder.fails
                return cls()

            def __getattr__(self, name: str) -> Any:
                def call(*args: Any, **kwargs: Any) -> None:
                    recorder.note(name, *args, *kwargs.values())
                    if recorder.fails is not None:
                        raise recorder.fails

                return call

        class Gpu:
            def __init__(self, index: int) -> None:
                self.index, self.uuid = index, "GPU-0"

            def set_current(self) -> None:
                recorder.note("set_current", self.index)

            def create_stream(self) -> Any:
                recorder.stream = SimpleNamespace(
                    sync=lambda: recorder.note("sync"), close=lambda: recorder.note("close stream")
                )
                return recorder.stream

        @contextmanager
        def group() -> Iterator[None]:
            recorder.note("group")
            yield
            recorder.note("end of group")

        names = {name: name for name in ("SUM", "MIN", "MAX", "PROD")}
        version = SimpleNamespace(libnccl=SimpleNamespace(version=SimpleNamespace(release=(2, 30, 1))))
        nccl, core, cuda, cuda_core = map(ModuleType, ("nccl", "nccl.core", "cuda", "cuda.core"))
        core.__dict__.update(names, Communicator=Communicator, group=group, get_version=lambda: version)
        core.__dict__.update(
            get_unique_id=lambda: SimpleNamespace(as_bytes=b"id"), UniqueId=SimpleNamespace(from_bytes=bytes)
        )
        cuda_core.__dict__.update(Device=Gpu)
        nccl.__dict__.update(core=core)
        cuda.__dict__.update(core=cuda_core)
        return {"nccl": nccl, "nccl.core": core, "cuda": cuda, "cuda.core": cuda_core}

    def note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args) if args else name)

    def since(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name, module in recorder.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return recorder


@pytest.fixture
def link(nccl: Recorder, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "_current_stream", lambda tensor: TORCH_STREAM)
    made = module.connect(LocalCommunicator(), Device("cuda", 1))
    assert nccl.since() == [("set_current", 1), ("init", 1, 0, b"id")]
    return made


class Tensor:
    """An array on a GPU whose framework does not name its stream."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


def test_a_tensor_without_a_stream_is_reduced_in_the_links_own_and_the_host_waits(nccl: Recorder, link: Any) -> None:
    tensor = Tensor()
    link.allreduce(tensor, Reduction.SUM)
    assert nccl.since() == [("set_current", 1), ("allreduce", tensor, tensor, "SUM", nccl.stream), "sync"]
    link.close()
    assert nccl.since() == [("set_current", 1), "finalize", "destroy", "close stream"]


@needs("torch")
def test_torchs_tensors_are_sent_in_its_current_stream_without_waiting(nccl: Recorder, link: Any) -> None:
    import torch

    values = torch.ones(3)
    link.allreduce(values, Reduction.MAX)
    link.allreduce(values[:0], Reduction.MAX)
    ((name, *_, op, stream),) = nccl.since()
    assert (name, op, stream) == ("allreduce", "MAX", TORCH_STREAM)
    link.alltoallv(torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), [0, 3], [2, 0])
    assert [call if isinstance(call, str) else (call[0], *call[2:]) for call in nccl.since()] == [
        *("group", ("recv", 0, TORCH_STREAM), ("send", 1, TORCH_STREAM), "end of group")
    ]
    same, other, received = (torch.zeros(count, dtype=torch.uint8) for count in (1, 2, 3))
    link.allgatherv(same, received[:2], [1, 1])
    assert [call[0] for call in nccl.since()] == ["allgather"]
    link.allgatherv(other, received, [2, 0, 1])
    begin, (_, own, first, *to_first), (_, rest, last, *to_last), end = nccl.since()
    assert (begin, end, to_first, to_last) == ("group", "end of group", [0, TORCH_STREAM], [2, TORCH_STREAM])
    assert own is other
    assert rest is last  # only the root's is read
    assert (first.data_ptr(), last.data_ptr()) == (received.data_ptr(), received[2:].data_ptr())


@needs("torch")
def test_torch_shares_an_array_that_refuses_a_stream() -> None:
    from choros.comm.devices import as_tensor

    class Refusing:
        """As TensorFlow's on a GPU, whose stream torch would give."""

        values = np.zeros(2, np.float32)

        def __dlpack__(self, **consumer: Any) -> Any:
            if consumer:
                raise RuntimeError("does not support DLPack export with a non-None stream")
            return self.values.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    as_tensor(Refusing())[1] = 7.0
    assert Refusing.values.tolist() == [0.0, 7.0]


def test_errors_of_nccl_are_engine_errors(nccl: Recorder, link: Any) -> None:
    nccl.fails = ValueError("ncclInternalError")
    with pytest.raises(EngineError, match="NCCL failed in allreduce: ncclInternalError"):
        link.allreduce(Tensor(), Reduction.SUM)
    module = sys.modules[MODULE]
    with pytest.raises(EngineError, match="NCCL cannot connect: ncclInternalError"):
        module.connect(LocalCommunicator(), Device("cuda", 0))
    nccl.fails = ValueError("Duplicate GPU detected")
    with pytest.raises(
        EngineError, match=r"several ranks have the same GPU, .* from version 2.30 on \(this is 2.30.1\)"
    ):
        module.connect(LocalCommunicator(), Device("cuda", 0))
    with pytest.raises(EngineUnavailable, match="tensors on cpu cannot be communicated by nccl4py"):
        module.connect(LocalCommunicator(), Device("cpu"))


def test_ranks_share_a_card_from_nccl_2_30_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    for version in ((2, 30), (3, 0, 1)):
        run_threads(partial(share_cards, card="GPU-1", version=version), 2)

    def refused(control: Communicator) -> None:
        with pytest.raises(EngineError, match=r"from version 2\.30 on \(this is 2\.29\.7\)"):
            share_cards(control, "GPU-1", (2, 29, 7))

    run_threads(refused, 2)


def test_why_nccl4py_cannot_be_used_is_one_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl4py_problem() in ("", "nccl4py is not installed", "this machine has no driver of NVIDIA's")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nccl" else real(name))
    assert nccl4py_problem() == "nccl4py is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))  # a folder of that name
    monkeypatch.delitem(sys.modules, "nccl.core", raising=False)
    assert nccl4py_problem().startswith("nccl4py cannot be imported (cannot import name 'core'")
    core = SimpleNamespace(get_version=lambda: SimpleNamespace(libnccl=None))
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(core=core))
    assert nccl4py_problem() == "nccl4py does not find NCCL's library, libnccl.so.2"


def test_the_installed_nccl4py_has_what_is_called() -> None:
    core = pytest.importorskip("nccl.core", reason="nccl4py is not installed")
    cuda = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    communicator = core.Communicator
    for function, *arguments in (
        (communicator.init, 2, 0, core.get_unique_id(empty=True)),
        (communicator.allreduce, None, "send", "receive", core.SUM),
        (communicator.broadcast, None, "send", "receive", 0),
        (communicator.allgather, None, "send", "receive"),
        (communicator.send, None, "send", 1),
        (communicator.recv, None, "receive", 1),
        (communicator.finalize, None),
        (communicator.destroy, None),
        (cuda.Device.set_current, None),
        (cuda.Device.create_stream, None),
        (cuda.Stream.sync, None),
        (cuda.Stream.close, None),
    ):
        inspect.signature(function).bind(*arguments)
    for function in (communicator.allreduce, communicator.broadcast, communicator.allgather, communicator.send):
        assert inspect.signature(function).parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {core.SUM, core.MIN, core.MAX, core.PROD} <= set(core.NcclRedOp)
    assert bytes(core.UniqueId.from_bytes(core.get_unique_id(empty=True).as_bytes)) == bytes(128)
    assert hasattr(core.get_version(), "libnccl")
    assert isinstance(cuda.Device.uuid, property) or inspect.isdatadescriptor(cuda.Device.uuid)


@pytest.mark.slow
def test_nccl4py_reads_our_buffers_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = pytest.importorskip("nccl.core.buffer", reason="nccl4py is not installed")
    tf = pytest.importorskip("tensorflow")
    from choros.arrays.tensorflow_arrays import _Buffer

    class OnGpu:
        """A tensor of TensorFlow that says that it is on the first GPU."""

        backing_device = "/job:localhost/replica:0/task:0/device:GPU:0"
        values = tf.ones(3)

    exported = tf.experimental.dlpack.to_dlpack
    monkeypatch.setattr(tf.experimental.dlpack, "to_dlpack", lambda tensor: exported(tensor.values))
    seen = buffers.NcclBuffer(_Buffer(OnGpu(), 3))
    address = np.from_dlpack(OnGpu.values).ctypes.data
    assert (seen.ptr, seen.count, seen.dtype.name, seen.device_id) == (address, 3, "FLOAT32", 3)
