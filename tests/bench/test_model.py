import math

import pytest

from choros.bench.figures import allreduce_terms, fit

SIZES = [1 << power for power in range(10, 29, 3)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_fit_recovers_the_model_from_its_own_times(ranks: int) -> None:
    terms = [allreduce_terms(ranks, size) for size in SIZES]
    found = fit(terms, [3e-6 * messages + 2e-10 * size for messages, size in terms])
    assert found is not None
    assert math.isclose(found[0], 3e-6)
    assert math.isclose(found[1], 2e-10)


def test_one_rank_or_one_size_has_no_model() -> None:
    assert fit([allreduce_terms(1, size) for size in SIZES], [1.0] * len(SIZES)) is None
    assert fit([allreduce_terms(2, 1000)], [1e-3]) is None


def test_the_latency_is_zero_rather_than_negative_if_times_grow_faster_than_sizes() -> None:
    found = fit([allreduce_terms(2, size) for size in (1000, 1_000_000)], [1e-6, 1e-2])
    assert found is not None
    assert found[0] == 0
    assert found[1] > 0
