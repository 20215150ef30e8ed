"""Training over a slow link with and without compression: bytes and accuracy, on two hosts with a rank each."""

from __future__ import annotations

import functools
import os

import choros
from choros.parallel.compression import Compression, Compressor
from choros.parallel.objects import allgather_object
from choros.parallel.reduce.local_updates import LocalUpdates
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from parallel.digits import HIDDEN, SGD, accuracy, batches, gradients, initial_weights

EPOCHS, STEPS = 5, 100
BIASES = HIDDEN + 10
ELEMENTS = 64 * HIDDEN + HIDDEN * 10


@functools.cache
def learned(compressor: Compressor) -> tuple[float, float]:
    """Returns the accuracy, and the bytes sent per step."""
    communicator = choros.global_process_set.communicator
    before = communicator.bytes_sent
    reducer = GradientReducer(ReduceConfig(compressor=compressor))
    optimizer = SGD(initial_weights())
    for batch in batches(choros.rank(), 2, EPOCHS):
        optimizer.step(reducer.reduce(gradients(optimizer.weights, batch), examples=len(batch)))
    return accuracy(optimizer.weights), (communicator.bytes_sent - before) / STEPS


def case_ranks_are_on_two_hosts() -> None:
    assert len(set(allgather_object(os.uname().nodename))) == 2


def case_power_sgd() -> None:
    baseline, all_bytes = learned(Compression.none)
    reached, sent = learned(Compression.power_sgd(2))
    assert baseline > 0.96
    assert abs(reached - baseline) <= 0.01
    assert all_bytes == 4 * (ELEMENTS + BIASES)
    assert sent == 4 * 2 * (64 + HIDDEN + HIDDEN + 10) + 4 * BIASES


def case_local_sgd() -> None:
    communicator = choros.global_process_set.communicator
    before = communicator.bytes_sent
    updates, examples = LocalUpdates(every=5), 0
    optimizer = SGD(initial_weights())
    updates.start(optimizer.weights)
    for batch in batches(choros.rank(), 2, EPOCHS):
        optimizer.step(gradients(optimizer.weights, batch))
        examples += len(batch)
        if updates.step():
            optimizer.weights, examples = updates.exchange(optimizer.weights, examples=examples), 0
    baseline, all_bytes = learned(Compression.none)
    assert abs(accuracy(updates.finish(optimizer.weights, examples=1)) - baseline) <= 0.01
    assert communicator.bytes_sent - before == all_bytes * STEPS / 5
