"""Compressions on ranks that are processes; on three, so that slices have different sizes."""

from __future__ import annotations

import numpy as np

import choros
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer

SHAPES = ((257, 64), (3, 3, 16, 24), (31,))
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)


def check(compressor: Compressor, rounds: int, close: float) -> None:
    """Checks that the mean result over many steps with constant gradients is close to them and equal on all ranks."""
    communicator = choros.global_process_set.communicator
    reducer = GradientReducer(ReduceConfig(compressor=compressor))
    gradients = [
        [np.random.default_rng(rank).normal(size=shape).astype(np.float32) for shape in SHAPES]
        for rank in range(choros.size())
    ]
    totals = [np.zeros(shape) for shape in SHAPES]
    for _ in range(rounds):
        for total, reduced in zip(totals, reducer.reduce(gradients[choros.rank()], examples=1), strict=True):
            total += reduced
            np.testing.assert_array_equal(reduced, communicator.broadcast(reduced))
    for total, *given in zip(totals, *gradients, strict=True):
        assert np.abs(total / rounds - np.mean(given, axis=0)).max() < close


def case_bf16() -> None:
    check(Compression.bf16, rounds=1, close=0.02)


def case_int8() -> None:
    check(Compression.int8, rounds=20, close=0.005)


def case_top_k() -> None:
    check(Compression.top_k(0.2), rounds=40, close=0.3)


def case_power_sgd() -> None:
    check(Compression.power_sgd(4), rounds=200, close=0.3)


def case_bytes_are_as_documented() -> None:
    communicator = choros.global_process_set.communicator
    reducer = GradientReducer(ReduceConfig(compressor=Compression.bf16))
    before = communicator.bytes_sent
    reducer.reduce([np.ones(shape, np.float32) for shape in SHAPES], examples=1)
    start, stop = choros.shard_range(ELEMENTS, choros.rank(), choros.size())
    assert communicator.bytes_sent - before == 2 * ELEMENTS + 2 * (stop - start)
