"""The gradient noise scale, by which one knows whether a larger batch would help; pure but for the last result.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), appendix A.1: with G the mean
and Σ the covariance of the gradients of single rows, the noise scale is tr(Σ) / |G|². Here for ranks with any numbers
of rows, or none. Rank i contributes p_i to the sum of all ranks: of each of its micro-batches w g, where g is the mean
over b rows. As rows are independent, with a_i = Σ w and v_i = Σ w²/b, and A and V their sums over the ranks::

    E |p_i|²   = a_i² |G|² + v_i tr(Σ)
    E |Σ p_i|² = A²   |G|² + V   tr(Σ)

The first, averaged over the ranks by their weights a_i, and the second are the two equations of the paper::

    small = (Σ |p_i|² / a_i) / A       E small = |G|² + tr(Σ) / b       1/b = (Σ v_i / a_i) / A
    large = |Σ p_i|² / A²              E large = |G|² + tr(Σ) / B       1/B = V / A²

    tr(Σ) = (small − large) / (1/b − 1/B)       |G|² = small − tr(Σ) / b

Weighted by its rows, w = b_i / B, B is the number of all rows, and b = B / n their mean over the n ranks that have any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

#: The weight of what was measured before in the moving averages: about the last 50 measured steps count.
_DECAY = 0.98


@final
@dataclass(frozen=True)
class NoiseScale:
    """What ``noise_scale`` returns; as text, a sentence.

    Attributes:
        noise_scale: tr(Σ) / |G|², in rows; infinite as long as the gradient does not stand out from its noise.
        batch: the rows of a step, of all ranks and micro-batches; the most, as last batches are smaller.
        steps: how many steps were measured.

    Example:
        >>> NoiseScale(noise_scale=1912.4, batch=4096, steps=50).critical_batch
        1912
    """

    noise_scale: float
    batch: float
    steps: int

    @property
    def critical_batch(self) -> float:
        """The batch that needs twice the fewest examples, and twice the fewest steps: the noise scale in whole rows."""
        return max(1, round(self.noise_scale)) if math.isfinite(self.noise_scale) else math.inf

    def __str__(self) -> str:
        return sentence(self.noise_scale, self.batch)


def sentence(noise_scale: float, batch: float) -> str:
    """Says what a batch costs: by equation 2.7 of the paper, 1 + B / B_noise times the fewest examples with which one
    could train as far, and 1 + B_noise / B times the fewest steps.

    >>> print(sentence(1912.4, 4096))
    the critical batch is about 1,900 rows; at 4,096 you pay 3.1 times the fewest examples, 1.5 times the fewest steps.
    >>> print(sentence(math.inf, 64))
    the gradient does not stand out from its noise at 64 rows: a much larger batch would help, or more measured steps.
    """
    if math.isinf(noise_scale):
        return (
            f"the gradient does not stand out from its noise at {batch:,.0f} rows: a much larger batch would help, or "
            "more measured steps."
        )
    critical = max(1.0, noise_scale)
    about = f"{float(f'{critical:.2g}'):,.0f} row"
    return (
        f"the critical batch is about {about}{'' if about == '1 row' else 's'}; at {batch:,.0f} you pay "
        f"{1 + batch / critical:.1f} times the fewest examples, {1 + critical / batch:.1f} times the fewest steps."
    )


class Contribution(NamedTuple):
    """Of what a rank contributes: a_i, v_i, and its rows."""

    weight: float = 0.0
    variance: float = 0.0
    rows: float = 0.0

    def adding(self, weight: float, examples: int) -> Contribution:
        """With a micro-batch, maybe of no rows."""
        if not examples:
            return self
        return Contribution(self.weight + weight, self.variance + weight * weight / examples, self.rows + examples)


class Estimate(NamedTuple):
    """Moving averages of |G|² and tr(Σ) over the measured steps. Both begin at zero; their ratio does not show it."""

    steps: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    rows: float = 0.0

    def result(self, rows: float = 1.0) -> NoiseScale:
        """As users see it, if each of what was counted has these rows."""
        scale = rows * max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf
        return NoiseScale(scale, rows * self.rows, int(self.steps))


def updated(before: Estimate, norms: Sequence[float], shares: Sequence[Contribution], norm_of_sum: float) -> Estimate:
    """Returns the estimate after a step: of each rank |p_i|² and its share, and |Σ p_i|². It stays as it is if fewer
    than two ranks had rows, or values overflowed.

    >>> updated(Estimate(), [6.0, 6.0], [Contribution().adding(0.5, 1)] * 2, 14.0).result()
    NoiseScale(noise_scale=5.0, batch=2.0, steps=1)
    """
    ranks = [(norm, share) for norm, share in zip(norms, shares, strict=True) if share.weight > 0]
    if len(ranks) < 2 or not math.isfinite(sum(norms) + norm_of_sum):
        return before
    weights = sum(share.weight for _, share in ranks)
    small, large = sum(norm / share.weight for norm, share in ranks) / weights, norm_of_sum / weights**2
    per_small = sum(share.variance / share.weight for _, share in ranks) / weights
    per_large = sum(share.variance for _, share in ranks) / weights**2
    noise = (small - large) / (per_small - per_large)
    signal = small - noise * per_small
    return Estimate(
        before.steps + 1,
        _DECAY * before.signal + (1 - _DECAY) * signal,
        _DECAY * before.noise + (1 - _DECAY) * noise,
        max(before.rows, sum(share.rows for _, share in ranks)),
    )


def announced(examples: int, *, due: bool) -> int:
    """The value of a control message: this rank's examples, and whether a measurement is due: a step is measured if it
    is due on one rank, and then on all.

    >>> announced(32, due=True), heard([65, 0])
    (65, ([32, 0], True))
    """
    return 2 * examples + due


def heard(values: Sequence[int]) -> tuple[Sequence[int], bool]:
    """The examples of all ranks, and whether one of them announced a measurement."""
    return [value >> 1 for value in values], any(value & 1 for value in values)


_latest: Estimate | None = None


def publish(estimate: Estimate | None) -> None:
    """Makes ``estimate``, of a step that has ended on all ranks, what ``noise_scale`` returns."""
    global _latest
    _latest = estimate


def noise_scale(rows: float = 1) -> NoiseScale | None:
    """Returns the gradient noise scale of the model that was trained last, the same on every rank: whether a larger
    batch would help. ``CHOROS_NOISE_SCALE=10`` (``chorosrun --noise-scale 10``) measures every tenth step.

    Args:
        rows: those of a rank's batch, in loops that do not pass their number to choros: there a batch counts as one.

    Returns:
        The noise scale; ``None`` before the first measured step, and where none is: with one rank, with a compression
        that leaves out parts of gradients, and inside XLA.

    Example:
        >>> import choros
        >>> choros.noise_scale() is None
        True
    """
    return None if _latest is None else _latest.result(rows)
