import math

import pytest

from choros.bench.figures import AlphaBeta, fit

SIZES = [1 << power for power in range(10, 29, 3)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_fit_recovers_the_model_from_its_own_times(ranks: int) -> None:
    truth = AlphaBeta(ranks, alpha_s=3e-6, beta_s=2e-10)
    found = fit(ranks, SIZES, [truth.seconds(size) for size in SIZES])
    assert found is not None
    assert math.isclose(found.alpha_s, truth.alpha_s)
    assert math.isclose(found.beta_s, truth.beta_s)


def test_one_rank_or_one_size_has_no_model() -> None:
    assert fit(1, SIZES, [1.0] * len(SIZES)) is None
    assert fit(2, [1000], [1e-3]) is None


def test_the_latency_is_zero_rather_than_negative_if_times_grow_faster_than_sizes() -> None:
    found = fit(2, [1000, 1_000_000], [1e-6, 1e-2])
    assert found is not None
    assert found.alpha_s == 0
    assert found.beta_s > 0
