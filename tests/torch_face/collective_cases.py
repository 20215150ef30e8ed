"""The collectives of the PyTorch API, but for what ``parallel/conformance_cases.py`` has; on two ranks."""

from __future__ import annotations

import inspect

import pytest
import torch

import choros.torch as hvd
from choros.errors import ConfigError, MismatchError


def values(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small numbers, whose sums are exact in every dtype."""
    return ((torch.arange(torch.Size(shape).numel()) + 2 * rank) % 5 + 1).reshape(shape).to(dtype)


def check(result: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
    """Checks the dtype, the shape and the values, up to one rounding of division."""
    assert result.dtype == expected.dtype, what
    torch.testing.assert_close(result, expected, msg=lambda text: f"{what}: {text}")


def case_asynchronous_collectives_have_no_gradient() -> None:
    x = torch.ones(hvd.size(), requires_grad=True)
    for result in (hvd.synchronize(hvd.allreduce_async(x)), hvd.synchronize(hvd.allgather_async(x))):
        assert not result.requires_grad


def case_tensors_in_place() -> None:
    """Large ones are reduced in their own memory, those that share it by way of other memory."""
    rank, size = hvd.rank(), hvd.size()
    large, total = torch.full((300, 400), rank + 1.0), size * (size + 1) / 2
    version = large._version
    assert hvd.allreduce_(large, op=hvd.Sum) is large
    assert large._version > version
    assert (large == total).all()
    transposed, strided = torch.full((300, 400), rank + 1.0).t(), torch.full((300, 800), rank + 1.0)[:, ::2]
    shared = torch.full((300, 400), rank + 1.0)
    group = [transposed, strided, shared, shared.view(-1)[:70_000], torch.full((2,), rank + 1.0)]
    assert hvd.grouped_allreduce_(group, op=hvd.Sum) == group
    for tensor in (transposed, strided, shared, group[-1]):
        assert (tensor == total).all(), tensor.shape
    apart = [torch.full((300, 400), rank + 1.0), torch.full((3,), rank + 1.0, dtype=torch.float64)]
    for tensor in hvd.grouped_allreduce_(apart):
        assert (tensor == total / size).all()
    assert hvd.grouped_allreduce_([]) == []


def case_gradients_that_share_memory() -> None:
    """Autograd gives views of one tensor to several parameters: their sums must not be taken twice."""
    rank, size = hvd.rank(), hvd.size()
    for shapes in (((400, 300), (120_000,)), ((400, 300), (300, 400))):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
        factor = torch.full((120_000,), rank + 1.0)
        ((parameters[0].view(-1) + parameters[1].view(-1)) * factor).sum().backward()
        optimizer.step()
        for parameter in parameters:
            assert (parameter == -size * (size + 1) / 2).all()


def case_gradients_of_gradients() -> None:
    """What a graph of higher derivatives holds keeps its values."""
    parameter = torch.nn.Parameter(torch.full((400, 300), 2.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
    with pytest.warns(UserWarning, match="create_graph=True"):
        (hvd.rank() * parameter**3).sum().backward(create_graph=True)
    first = parameter.grad
    optimizer.synchronize()
    (second,) = torch.autograd.grad(first.sum(), parameter)
    assert (second == 6 * 2.0 * hvd.rank()).all()
    parameter.grad = None


def case_sparse_tensors() -> None:
    size, rank = hvd.size(), hvd.rank()

    def sparse(of: int, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.tensor([[0, of, of]])
        return torch.sparse_coo_tensor(rows, values(of, dtype, 3, 2), (size, 2), check_invariants=True)

    for dtype in (torch.float32, torch.float64, torch.float16):
        total = sum(sparse(each, dtype).to_dense() for each in range(size))
        for result in (
            hvd.sparse_allreduce_async(sparse(rank, dtype), "rows", hvd.Sum)(),
            hvd.allreduce(sparse(rank, dtype), op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async(sparse(rank, dtype), op=hvd.Sum)),
            hvd.grouped_allreduce([sparse(rank, dtype)], op=hvd.Sum)[0],
        ):
            assert result.is_sparse
            check(result.to_dense(), total)
        check(hvd.sparse_allreduce_async(sparse(rank, dtype), "rows", hvd.Average)().to_dense(), total / size)
    points = torch.sparse_coo_tensor([[rank, 0], [1, 0]], [1.0, 2.0], (size, 2), check_invariants=True)
    expected = torch.zeros(size, 2)
    expected[:, 1] += 1
    expected[0, 0] += 2 * size
    check(hvd.allreduce(points, op=hvd.Sum).to_dense(), expected)
    for differ in ({"op": hvd.Sum if rank else hvd.Average}, {"op": hvd.Sum, "prescale_factor": 1.0 + rank}):
        with pytest.raises(MismatchError, match="op="):
            hvd.allreduce(points, **differ)
    with pytest.raises(ConfigError, match="pass dense ones to allreduce_async"):
        hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)


def case_compression() -> None:
    tensor = values(0, torch.float64, 3)
    for compression, sent in ((hvd.Compression.none, torch.float64), (hvd.Compression.fp16, torch.float16)):
        compressed, context = compression.compress(tensor)
        assert compressed.dtype == sent
        check(compression.decompress(compressed, context), tensor)
    integers, context = hvd.Compression.fp16.compress(torch.arange(3))
    check(hvd.Compression.fp16.decompress(integers, context), torch.arange(3))


def case_errors_are_those_that_scripts_catch() -> None:
    rank, size = hvd.rank(), hvd.size()
    for kind in (hvd.HorovodInternalError, MismatchError, RuntimeError, ValueError):
        for call in (hvd.allreduce, lambda x: hvd.synchronize(hvd.allreduce_async(x))):
            with pytest.raises(kind, match="Ranks made different calls"):
                call(torch.ones(2 + rank))
    for call in (
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.float32 if rank else torch.int32)),
        lambda: hvd.allgather(torch.ones(2, 2 + rank)),
        lambda: hvd.broadcast(torch.ones(2), rank),
        lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(1 + rank)]),
        lambda: hvd.reducescatter(torch.ones(size, 1 + rank)),
        lambda: hvd.alltoall(torch.ones(size, 1 + rank)),
    ):
        with pytest.raises(hvd.HorovodInternalError):
            call()
    for call in (
        lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum),
        lambda: hvd.allreduce_async(torch.ones(2), average=True, op=hvd.Sum),
        lambda: hvd.alltoall(torch.ones(size), splits=torch.ones(size + 1, dtype=torch.int32)),
        lambda: hvd.alltoall(torch.ones(size), splits=torch.ones(size)),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.reducescatter(torch.ones(size), op=hvd.Adasum),
        lambda: hvd.broadcast(torch.ones(2), size),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
    for dtype in (torch.float32, torch.int32):
        with pytest.raises(NotImplementedError, match="combines whole arrays"):
            hvd.reducescatter(torch.ones(size, dtype=dtype), op=hvd.Adasum)
    hvd.barrier()


def case_deprecated_average_warns_where_it_is_used() -> None:
    for call in (hvd.allreduce, hvd.allreduce_, hvd.grouped_allreduce_):
        with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as caught:
            call([torch.ones(2)] if call is hvd.grouped_allreduce_ else torch.ones(2), average=False)
        assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as caught:
        handle = hvd.allreduce_async(torch.ones(2), average=True)
    assert caught[0].filename == __file__
    check(hvd.synchronize(handle), torch.ones(2))


def case_variants_have_signatures_and_documentation() -> None:
    for name in ("allreduce_async", "allreduce_", "allreduce_async_"):
        function = getattr(hvd, name)
        assert function.__name__ == name
        assert list(inspect.signature(function).parameters) == [
            "tensor",
            "average",
            "name",
            "op",
            "prescale_factor",
            "postscale_factor",
            "process_set",
        ]
        assert "process_set: the participating ranks." in function.__doc__
    assert hvd.synchronize(hvd.broadcast_async(tensor=torch.ones(1), root_rank=0, name="named")).tolist() == [1]
    with pytest.raises(TypeError, match="missing a required argument: 'root_rank'"):
        hvd.broadcast_async(torch.ones(1))


def case_what_is_built() -> None:
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not hvd.gloo_enabled()
    assert hvd.gloo_built()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert isinstance(hvd.nccl_built(), int)
    assert hvd.cuda_built() == (torch.version.cuda is not None or hvd.nccl_built() > 0)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert isinstance(hvd.mpi_threads_supported(), bool)


def case_operations_are_horovods_integers() -> None:
    operations = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert operations == list(range(6))
    assert [int(op) for op in operations] == list(range(6))
    assert hvd.allreduce(torch.ones(2), op=1).tolist() == [hvd.size()] * 2
    assert hvd.Average != hvd.Sum
    assert hvd.Sum != "Sum"
