"""What differs between ranks: which array of which rank, found by fingerprints, and healed on request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from choros.arrays.adapter import fingerprint
from choros.comm import ProcessSet
from choros.comm.engines.threads import run_threads
from choros.errors import DriftError
from choros.parallel.identical import Comparison, check_identical
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from choros.settings import current
from harness import needs

NAMES = ["first", "kernel", "bias"]


def set_of(communicator):
    process_set = ProcessSet(communicator.ranks)
    process_set.register(0, communicator.ranks, communicator)
    return process_set


def flipped(array, bit):
    """A copy with one bit of one element flipped."""
    words = array.copy().view(np.uint32)
    words.reshape(-1)[array.size // 2] ^= np.uint32(1 << bit)
    return words.view(array.dtype)


def arrays_of(rank, bits):
    """The same on each rank, but for one bit of the kernel."""
    generator = np.random.default_rng(0)
    first, kernel, bias = (generator.normal(size=size).astype("float32") for size in (7, (300, 40), 40))
    return [first, flipped(kernel, bits[rank]) if rank in bits else kernel, bias]


def compared(bits, ranks, **settings):
    def check(communicator):
        arrays = arrays_of(communicator.rank, bits)

        def assign(index, value):
            arrays[index] = value

        comparison = Comparison(**settings)
        check_identical(NAMES, arrays, comparison, advice="Do it.", process_set=set_of(communicator), assign=assign)
        return arrays

    return run_threads(check, ranks)


def test_the_rank_that_differs_from_most_and_the_first_array_are_named():
    expected = (
        r"^after step 300, ranks have different values of 1 of 3 variables, first of 'kernel' \(rank 2 has "
        r"others than most\)\. The largest difference is in 'kernel': up to \S+ between ranks 0 and 2, .* Do it\.$"
    )
    with pytest.raises(DriftError, match=expected):
        compared({2: 30}, 4, step=300)
    with pytest.raises(DriftError, match=r"first of 'kernel'\. The .* between ranks 0 and 1"):
        compared({0: 30}, 2, step=300)


@pytest.mark.parametrize("bits", [{0: 30}, {0: 31, 2: 3}, {3: 0}])
def test_ranks_are_healed_by_the_lowest_of_those_that_most_agree_with(bits, caplog):
    results = compared(bits, 4, step=100, divergence="heal")
    for arrays in results:
        for array, expected in zip(arrays, arrays_of(1, {}), strict=True):
            np.testing.assert_array_equal(array, expected)
    right = min(set(range(4)) - set(bits))
    assert f"All ranks continue with the values of rank {right}." in caplog.text


def test_ranks_that_differ_can_go_on_after_one_warning(caplog):
    for step in (300, 400):
        results = compared({2: 30}, 3, step=step, divergence="warn")
        assert len({arrays[1].tobytes() for arrays in results}) == 2
    assert [record.message.partition(",")[0] for record in caplog.records] == ["after step 300"]
    assert caplog.records[0].message.endswith("Do it. This is said once.")


def test_differences_like_rounding_are_one_warning(caplog):
    for step in (100, 200):
        compared({1: 0}, 3, step=step)
    assert [record.message.partition(",")[0] for record in caplog.records] == ["after step 100"]
    assert "first of 'kernel' (rank 1 has others than most)" in caplog.text
    assert "Rounding on different processors does that, a step that assigns trained variables itself" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 1020, 2041, 5000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_fingerprints_differ_where_bytes_do(size, dtype):
    array = np.arange(size).astype(dtype)
    assert fingerprint(array) == fingerprint(array.copy())
    for index in {0, size // 2, size - 1} if size else ():
        other = array.copy()
        other.view(np.uint8)[index * array.itemsize] ^= 1
        assert fingerprint(other) != fingerprint(array)


def test_rows_that_are_exchanged_have_another_fingerprint():
    rows = np.random.default_rng(0).normal(size=(4096, 256))
    assert fingerprint(rows) != fingerprint(rows[::-1])


@needs("torch")
@pytest.mark.parametrize("shape", [(), (3,), (5000, 3), (1021, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_devices_compute_the_same_fingerprint(shape, dtype):
    import torch

    from choros.arrays.torch_arrays import TorchArrays

    tensor = torch.full(shape, 3).cumsum(0).to(getattr(torch, dtype)) if shape else torch.tensor(2).to(torch.float32)
    assert TorchArrays.fingerprint_on_device(tensor) == TorchArrays().fingerprint(tensor)


def test_models_that_are_trained_in_turn_are_both_compared(monkeypatch):
    monkeypatch.setattr("choros.settings._config", replace(current(), compare_every=4))

    def train(communicator):
        reducer = GradientReducer(ReduceConfig(process_set=set_of(communicator)))
        due = []
        for step in range(1, 10):
            for model in (1, 2):
                reducer.reduce([np.zeros(model)], examples=1)
                if reducer.due is not None:
                    due.append((step, model))
        return due

    assert run_threads(train, 2) == [[(step, model) for step in (2, 4, 8) for model in (1, 2)]] * 2
