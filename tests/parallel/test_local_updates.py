"""Local SGD and DiLoCo on ranks that are threads: the synchronous mean, uneven steps, bytes, and accuracy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from choros.comm import ProcessSet
from choros.errors import ConfigError, MismatchError
from choros.parallel.compression import Compression
from choros.parallel.reduce.local_updates import LocalUpdates, OuterSGD
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from parallel.digits import SGD, accuracy, batches, gradients, initial_weights
from parallel.threads import on_threads

AVERAGE, DILOCO = OuterSGD(), OuterSGD(0.7, 0.9, nesterov=True)


def train(
    every: int,
    outer: OuterSGD = AVERAGE,
    *,
    steps: Sequence[int] = (12, 12),
    momentum: float = 0.0,
    rate: float = 0.1,
    **more: Any,
) -> list[tuple[list[NDArray], int]]:
    """Returns the weights of each rank after its steps, and the bytes it has sent."""

    def rank_main(process_set: ProcessSet) -> tuple[list[NDArray], int]:
        communicator = process_set.communicator
        updates = LocalUpdates(every, outer, process_set=process_set, **more)
        optimizer = SGD(initial_weights(), rate, momentum)
        updates.start(optimizer.weights)
        examples = 0
        own = list(batches(communicator.rank, communicator.size, epochs=-(-max(steps) // 20)))
        for batch in own[: steps[communicator.rank]]:
            optimizer.step(gradients(optimizer.weights, batch))
            examples += len(batch)
            if updates.step():
                optimizer.weights = updates.exchange(optimizer.weights, examples=examples)
                examples = 0
        return updates.finish(optimizer.weights, examples=examples), communicator.bytes_sent

    return on_threads(len(steps), rank_main)


@functools.cache
def synchronous(steps: int, momentum: float = 0.0) -> list[NDArray]:
    """Returns the weights after ``steps`` steps of synchronous training."""

    def rank_main(process_set: ProcessSet) -> list[NDArray]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        optimizer = SGD(initial_weights(), momentum=momentum)
        for batch in list(batches(process_set.communicator.rank, 2, epochs=-(-steps // 20)))[:steps]:
            optimizer.step(reducer.reduce(gradients(optimizer.weights, batch), examples=len(batch)))
        return optimizer.weights

    return on_threads(2, rank_main)[0]


def assert_close(ours: Sequence[NDArray], theirs: Sequence[NDArray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def assert_all_same(results: Sequence[tuple[list[NDArray], int]]) -> None:
    for weights, _ in results:
        for one, other in zip(weights, results[0][0], strict=True):
            np.testing.assert_array_equal(one, other)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


def test_averaging_in_every_step_is_synchronous_training() -> None:
    results = train(every=1)
    assert_all_same(results)
    assert_close(results[0][0], synchronous(12))


def test_average_is_weighted_by_examples() -> None:
    def rank_main(process_set: ProcessSet) -> list[float]:
        updates = LocalUpdates(5, process_set=process_set)
        updates.start([np.full(2, 10.0)])
        final, examples = ((13.0, 30), (6.0, 10))[process_set.communicator.rank]
        return updates.exchange([np.full(2, final)], examples=examples)[0].tolist()

    assert on_threads(2, rank_main) == [[(3 * 13 + 6) / 4] * 2] * 2


def test_outer_momentum_is_nesterovs() -> None:
    """As in PyTorch: the velocity accumulates gradients, and the step adds the next velocity in advance."""
    moves = [0.3, -0.1, 0.25]
    weight, velocity, expected = 1.0, 0.0, []
    for move in moves:
        velocity = 0.9 * velocity - move
        weight -= 0.7 * (-move + 0.9 * velocity)
        expected.append(weight)

    def rank_main(process_set: ProcessSet) -> list[float]:
        updates = LocalUpdates(1, DILOCO, process_set=process_set)
        updates.start([np.array([1.0])])
        weights, seen = [np.array([1.0])], []
        for move in moves:
            own = 2 * move * process_set.communicator.rank  # the mean over the ranks is ``move``
            weights = updates.exchange([weights[0] + own], examples=1)
            seen.append(float(weights[0][0]))
        return seen

    for seen in on_threads(2, rank_main):
        np.testing.assert_allclose(seen, expected, rtol=1e-12)


@pytest.mark.parametrize("outer", [AVERAGE, DILOCO], ids=["local_sgd", "diloco"])
@pytest.mark.parametrize("steps", [(7, 3), (3, 7), (5, 0), (4, 8), (0, 0), (9, 2, 6)])
def test_ranks_with_different_numbers_of_steps_end_with_the_same_weights(
    steps: tuple[int, ...], outer: OuterSGD
) -> None:
    results = train(every=4, outer=outer, steps=steps)
    assert_all_same(results)
    if not any(steps):
        assert_close(results[0][0], initial_weights())


def test_outer_state_is_the_same_after_an_uneven_epoch() -> None:
    def rank_main(process_set: ProcessSet) -> float:
        rank = process_set.communicator.rank
        updates = LocalUpdates(1, DILOCO, process_set=process_set)
        weights = [np.zeros(3)]
        updates.start(weights)
        for steps in ((3, 1), (1, 1)):
            for _ in range(steps[rank]):
                updates.step()
                weights = updates.exchange([weights[0] - 1.0], examples=1)
            weights = updates.finish(weights, examples=0)
        return float(weights[0][0])

    one, other = on_threads(2, rank_main)
    assert one == other


def test_given_and_returned_weights_may_be_changed() -> None:
    def rank_main(process_set: ProcessSet) -> None:
        updates = LocalUpdates(1, process_set=process_set)
        weights = [np.zeros(3)]
        updates.start(weights)
        weights[0] += 1
        first = updates.exchange(weights, examples=1)
        np.testing.assert_array_equal(first[0], 1)
        first[0] += 5
        np.testing.assert_array_equal(updates.exchange([np.full(3, 3.0)], examples=1)[0], 3)

    on_threads(2, rank_main)


# ── bytes and accuracy ───────────────────────────────────────────────────────────────────────────

NBYTES = sum(weight.nbytes for weight in initial_weights())


@pytest.mark.parametrize("every", [1, 4, 6])
def test_bytes_are_divided_by_every(every: int) -> None:
    assert [sent for _, sent in train(every)] == [NBYTES * 12 // every] * 2


def test_compressed_bytes_are_divided_by_every() -> None:
    assert [sent for _, sent in train(4, compressor=Compression.fp16)] == [NBYTES // 2 * 3] * 2


@pytest.mark.parametrize(
    ("every", "outer", "compressor"),
    [
        (8, AVERAGE, Compression.none),
        (5, OuterSGD(0.7, 0.5, nesterov=True), Compression.none),
        (5, OuterSGD(0.7, 0.5, nesterov=True), Compression.int8),
        (8, AVERAGE, Compression.power_sgd(2)),
    ],
    ids=["local_sgd", "diloco", "diloco-int8", "local_sgd-power_sgd"],
)
def test_accuracy_is_that_of_synchronous_training(every: int, outer: OuterSGD, compressor: Any) -> None:
    results = train(every, outer, steps=(400, 400), momentum=0.9, compressor=compressor)
    assert_all_same(results)
    assert accuracy(synchronous(400, 0.9)) > 0.97
    assert abs(accuracy(results[0][0]) - accuracy(synchronous(400, 0.9))) <= 0.01


# ── invalid arguments ────────────────────────────────────────────────────────────────────────────


def test_ranks_with_different_weights_mismatch() -> None:
    def rank_main(process_set: ProcessSet) -> None:
        updates = LocalUpdates(1, process_set=process_set)
        weights = [np.zeros(3 + process_set.communicator.rank)]
        updates.start(weights)
        with pytest.raises(MismatchError, match=r"float64\[3\]"):
            updates.exchange(weights, examples=1)

    on_threads(2, rank_main)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LocalUpdates(0), "every=0: there must be 1 step or more"),
        (lambda: OuterSGD(0.0), "outer learning rate 0.0 must be greater than 0"),
        (lambda: OuterSGD(1.0, 1.0), "outer momentum 1.0 must be at least 0 and less than 1"),
        (lambda: OuterSGD(nesterov=True), "nesterov=True needs an outer momentum"),
    ],
)
def test_invalid_arguments(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
