"""The gradient noise scale of gradients whose mean and covariance are known, on ranks that are threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from choros import settings
from choros.comm import ProcessSet, Reduction
from choros.parallel.compression import Compression
from choros.parallel.reduce.gradients import SparseRows, layout_of, squared_norm
from choros.parallel.reduce.noise import Contribution, NoiseScale, noise_scale, publish, sentence
from choros.parallel.reduce.plan import ReduceConfig, plan_for
from choros.parallel.reduce.reducer import GradientReducer
from choros.settings import Config
from parallel.threads import on_threads

#: The gradient of one row is normal around MEAN, with the variances VARIANCES.
MEAN = np.full(300, 0.4)
VARIANCES = np.linspace(0.5, 4.0, 300)
TRUE = float(VARIANCES.sum() / (MEAN @ MEAN))


@pytest.fixture(autouse=True)
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Measures every step, or each of another number."""

    def each(every: int) -> None:
        monkeypatch.setattr(settings, "_config", replace(Config.from_environ({}), noise_scale=every))

    publish(None)
    each(1)
    return each


def batches(rank: int, rows: Sequence[int], seed: int = 5) -> itertools.starmap:
    """Endless batches of a rank, of these numbers of rows in turn: the mean gradient of each, in two arrays."""
    generator = np.random.default_rng([seed, rank])

    def batch(count: int) -> tuple[list[NDArray], int]:
        drawn = MEAN + np.sqrt(VARIANCES / max(count, 1)) * generator.normal(size=300)
        return [drawn[:100].astype(np.float32).reshape(10, 10), drawn[100:]], count

    return map(batch, itertools.cycle(rows))


def estimates(rows: Sequence[Sequence[int]], *, steps: int = 250, **config: Any) -> list[NoiseScale | None]:
    """What each rank has after these steps; a rank's ``rows`` are those of its batches."""

    def rank_main(process_set: ProcessSet) -> NoiseScale | None:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, **config))
        own = itertools.islice(batches(process_set.rank(), rows[process_set.rank()]), steps)
        for step, (gradients, examples) in enumerate(own, start=1):
            reducer.reduce(gradients, examples=examples, exchange=step % reducer.config.micro_batches == 0)
        return result_of(reducer)

    return on_threads(len(rows), rank_main)


def result_of(reducer: GradientReducer) -> NoiseScale | None:
    latest = reducer._settled.latest
    return latest and latest.result()


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        ([[16], [16]], {}),
        ([[24, 9], [3]], {}),
        ([[24, 9, 16], [3, 0, 8], [7, 7, 0]], {}),
        ([[12], [5], [0]], {}),
        ([[24, 9], [3, 5]], {"micro_batches": 2}),
        ([[24, 9], [3, 0]], {"micro_batches": 2, "average_micro_batches": False}),
        ([[12], [5]], {"predivide_factor": 3.0}),
        ([[12], [5]], {"op": Reduction.SUM}),
        ([[12], [5]], {"compressor": Compression.fp16}),
        ([[12], [5]], {"compressor": Compression.bf16}),
    ],
    ids=lambda each: str([*each]),
)
def test_the_estimate_is_within_a_tenth_and_the_same_on_all_ranks(rows: list[list[int]], config: dict) -> None:
    first, *others = estimates(rows, **config)
    assert first is not None
    assert first.noise_scale == pytest.approx(TRUE, rel=0.1)
    assert first.steps == 250 // config.get("micro_batches", 1)
    assert others == [first] * len(others)
    assert noise_scale() == first


def test_a_rank_that_has_joined_has_the_number_of_the_others() -> None:
    def rank_main(process_set: ProcessSet) -> NoiseScale | None:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        steps = 4 if process_set.rank() == 2 else 40
        for gradients, examples in itertools.islice(batches(process_set.rank(), [8]), steps):
            reducer.reduce(gradients, examples=examples)
        reducer.join(layout_of([np.zeros((10, 10), np.float32), np.zeros(200)]))
        return result_of(reducer)

    first, *others = on_threads(3, rank_main)
    assert first is not None
    assert (first.steps, first.batch, others) == (40, 24, [first, first])


def test_each_nth_step_is_measured_and_a_rank_that_came_later_goes_on_as_the_others(measure: Any) -> None:
    measure(4)

    def rank_main(process_set: ProcessSet) -> list[NoiseScale | None]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        results = []
        for step, (gradients, examples) in enumerate(itertools.islice(batches(process_set.rank(), [8]), 16)):
            if step == 6 and process_set.rank() == 1:
                reducer = GradientReducer(ReduceConfig(process_set=process_set))
            reducer.reduce(gradients, examples=examples)
            results.append(result_of(reducer))
        return results

    first, second = on_threads(2, rank_main)
    assert [each and each.steps for each in first] == [None] * 3 + [1] * 4 + [2] * 4 + [3] * 4 + [4]
    assert second[7:] == first[7:]


def test_buckets_are_measured_as_one_step() -> None:
    def rank_main(process_set: ProcessSet) -> list[NoiseScale | None]:
        results = []
        for size in (None, 1):
            reducer = GradientReducer(ReduceConfig(process_set=process_set, bucket_bytes=size))
            for gradients, examples in itertools.islice(batches(process_set.rank(), [8, 3]), 5):
                for bucket, indices in enumerate(reducer.plan(layout_of(gradients))):
                    reducer.send(bucket, [gradients[index] for index in indices], examples=examples)
            results.append(result_of(reducer))
        return results

    for whole, in_buckets in on_threads(2, rank_main):
        assert whole is not None
        assert in_buckets is not None
        assert in_buckets.noise_scale == pytest.approx(whole.noise_scale)
        assert in_buckets.steps == 5


def test_what_is_reduced_has_the_same_bits_as_without(measure: Any) -> None:
    def rank_main(process_set: ProcessSet) -> list[list[bytes]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        sparse = SparseRows(np.array([2, 0, 2]), np.full((3, 2), 1.5 + process_set.rank()), shape=(5, 2))
        results = []
        for gradients, examples in itertools.islice(batches(process_set.rank(), [8, 3]), 6):
            *dense, rows = reducer.reduce([*gradients, sparse], examples=examples)
            results.append([*(each.tobytes() for each in dense), rows.values.tobytes(), rows.indices.tobytes()])
        assert (result_of(reducer) is not None) is bool(settings.current().noise_scale)
        return results

    measured = on_threads(2, rank_main)
    measure(0)
    assert on_threads(2, rank_main) == measured


@pytest.mark.parametrize("rows", [[[8]], [[8], [0]]], ids=str)
def test_one_rank_with_rows_measures_nothing(rows: list[list[int]]) -> None:
    assert estimates(rows, steps=3) == [None] * len(rows)
    assert noise_scale() is None


@pytest.mark.parametrize(
    "compressor",
    [Compression.int8, Compression.top_k(0.5), Compression.power_sgd(1)],
    ids=["int8", "top_k", "power_sgd"],
)
def test_compressions_that_leave_out_parts_measure_nothing(compressor: Any) -> None:
    assert estimates([[8], [3]], steps=3, compressor=compressor) == [None, None]


def test_gradients_that_overflow_are_left_out() -> None:
    def rank_main(process_set: ProcessSet) -> NoiseScale | None:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        for step, (gradients, examples) in enumerate(itertools.islice(batches(process_set.rank(), [8]), 5)):
            if step == 2 and process_set.rank() == 1:
                gradients[1][7] = np.inf
            reducer.reduce(gradients, examples=examples)
        return result_of(reducer)

    first, second = on_threads(2, rank_main)
    assert first is not None
    assert math.isfinite(first.noise_scale)
    assert (first.steps, second) == (4, first)


def test_complex_gradients_are_reduced_and_not_measured() -> None:
    def rank_main(process_set: ProcessSet) -> tuple[complex, NoiseScale | None]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        return reducer.reduce([np.full(1, 2 + 4j * process_set.rank())], examples=1)[0].item(), result_of(reducer)

    assert on_threads(2, rank_main) == [(2 + 2j, None)] * 2


def test_ranks_with_different_settings_make_different_requests(measure: Any) -> None:
    def rank_main(process_set: ProcessSet) -> str:
        return str(plan_for(ReduceConfig(process_set=process_set), "", (), (100, "error")).request)

    (measured,) = on_threads(1, rank_main)
    measure(0)
    (other,) = on_threads(1, rank_main)
    assert ("noise scale every 1 steps" in measured, "noise scale" in other) == (True, False)


# ── what users see ───────────────────────────────────────────────────────────────────────────────


def test_a_share_counts_no_batch_without_rows() -> None:
    assert Contribution().adding(0.5, 4).adding(0.25, 0) == Contribution(weight=0.5, variance=0.0625, rows=4)


def test_the_norm_sums_rows_that_occur_twice_and_widens_halves() -> None:
    rows = SparseRows(np.array([1, 1]), np.ones((2, 1), np.float16), shape=(3, 1))
    assert squared_norm([rows, np.full(3, 300, np.float16)]) == 4 + 3 * 90000


@pytest.mark.parametrize(
    ("scale", "batch", "said"),
    [
        (1912.4, 4096, "about 1,900 rows; at 4,096 you pay 3.1 times the fewest examples, 1.5 times the fewest steps."),
        (7.6, 16, "about 8 rows; at 16 you pay 3.1 times the fewest examples, 1.5 times the fewest steps."),
        (0.0, 64, "about 1 row; at 64 you pay 65.0 times the fewest examples, 1.0 times the fewest steps."),
        (math.inf, 64, "the gradient does not stand out from its noise at 64 rows"),
    ],
)
def test_the_sentence(scale: float, batch: float, said: str) -> None:
    assert said in sentence(scale, batch)
    assert str(NoiseScale(scale, batch, 1)) == sentence(scale, batch)


def test_the_critical_batch_is_in_whole_rows() -> None:
    assert [NoiseScale(each, 8, 1).critical_batch for each in (0.2, 1912.4, math.inf)] == [1, 1912, math.inf]
