"""The verdict on a job: pure, on steps of which the truth is known, and of real jobs."""

from dataclasses import replace

import pytest

from choros.launch.plan.roles import NO_ROLES
from choros.observe.progress import RankProgress
from choros.observe.verdict import (
    Bottleneck,
    Stragglers,
    goodput_of,
    goodput_text,
    last_lines,
    verdict_of,
    verdict_text,
)


def job(*ranks, steps=200, examples=(32,)):
    """What ranks have done that spend these times in each step, by name, with batches of ``examples`` in turn."""
    own = [sum(each.get(name, 0.0) for name in ("computing", "loading", "committing")) for each in ranks]
    step = max(own) + max(each.get("exchanging", 0.0) for each in ranks)
    rows = [examples[number % len(examples)] for number in range(steps)]
    return [
        RankProgress(
            number,
            steps,
            seconds=steps * step,
            waiting=steps * (max(own) - own[number]),
            examples=sum(rows),
            squares=sum(each**2 for each in rows),
            products=sum(each * (rank["computing"] + rank.get("loading", 0.0)) for each in rows),
            **{name: steps * seconds for name, seconds in rank.items() if name != "computing"},
        )
        for number, rank in enumerate(ranks)
    ]


QUICK = {"computing": 0.05}
SLOW = {"computing": 0.15}
LOADS = {"computing": 0.05, "loading": 0.1}
EXCHANGES = {"computing": 0.05, "exchanging": 0.15}
COMMITS = {"computing": 0.05, "committing": 0.05}


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([QUICK, QUICK, LOADS], Bottleneck("input", (2,), 2 / 3, 3.0)),
        ([LOADS, LOADS], Bottleneck("input", (), 2 / 3, 3.0)),
        ([QUICK, SLOW, QUICK], Bottleneck("compute", (1,), 2 / 3, 3.0)),
        ([EXCHANGES, EXCHANGES], Bottleneck("exchange", (), 3 / 4, 4.0)),
        ([COMMITS, QUICK], Bottleneck("commits", (0,), 1 / 2, 2.0)),
        ([QUICK | {"loading": 0.002}, QUICK], None),
    ],
    ids=["input of a rank", "input of all", "a slow rank", "exchange", "commits", "nothing"],
)
def test_what_holds_a_job_back_and_what_it_would_gain(ranks, found):
    verdict = verdict_of(job(*ranks))
    assert sum(verdict.shares.values()) == pytest.approx(1)
    assert (verdict.bottleneck is None) == (found is None)
    if found is not None:
        assert verdict.bottleneck == replace(found, share=pytest.approx(found.share), gain=pytest.approx(found.gain))


def test_small_batches():
    """A step of 8 ms, of which each row takes 10 µs; one batch of ten has fewer rows."""
    rows = [32] * 9 + [4]
    seconds = [0.00768 + 10e-6 * each for each in rows]
    one = job({"computing": 0.0}, steps=2000, examples=rows)[0]
    times = {"seconds": 200 * sum(seconds), "products": 200 * sum(x * y for x, y in zip(rows, seconds, strict=True))}
    found = verdict_of([replace(one, **times), replace(one, rank=1, **times)]).bottleneck
    assert (found.cause, found.ranks) == ("batch size", ())
    assert found.share == pytest.approx(0.965, abs=0.01)
    assert found.gain == pytest.approx(4 / (1 + 3 * 0.0365), rel=0.01)
    assert verdict_of([replace(one, seconds=16.0, products=one.examples * 0.008)]).bottleneck is not None
    same = replace(one, examples=64000.0, squares=64000.0 * 32, seconds=16.0, products=512.0)
    assert verdict_of([same, same]).bottleneck is None  # all have as many rows: it cannot be known


def test_what_varies_goes_with_what_it_varies_with():
    """Ranks load for 50 ms of a step of 55, and wait for each other in turn, 20 ms each."""
    ranks = job({"computing": 0.005, "loading": 0.05}, {"computing": 0.005, "loading": 0.05}, steps=400)
    varied = [replace(each, seconds=each.seconds + 8.0, waiting=8.0) for each in ranks]
    assert verdict_of(varied).bottleneck == Bottleneck("input", (), pytest.approx(2 / 3), pytest.approx(11.0))


def test_few_smaller_batches_prove_nothing():
    rows, seconds = [32] * 199 + [4], 0.008
    few = job({"computing": seconds}, steps=2000, examples=rows)
    assert verdict_of(few).bottleneck is None
    more = job({"computing": seconds}, steps=4000, examples=rows)
    assert verdict_of(more * 2).bottleneck.cause == "batch size"


def test_jobs_that_are_too_short_have_none():
    assert verdict_of([]) is None
    assert verdict_of(job(SLOW, SLOW, steps=19)) is None
    assert verdict_of(job({"computing": 0.04}, steps=200)) is None  # 8 s


def test_a_rank_that_was_lost_early_does_not_count():
    first, second, third = job(QUICK, QUICK, LOADS)
    lost = RankProgress(2, 10, seconds=9.0, loading=8.0)
    assert verdict_of([first, second, lost]).bottleneck is None
    assert verdict_of([first, second, third]).bottleneck is not None


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([QUICK, SLOW], "slowed down by rank 1: it computes 67 % of each step longer than others do, which wait. If it "
         "computed as fast, steps would be 3.0 times as fast."),
        ([LOADS, LOADS, QUICK], "input-bound on ranks 0, 1: they load data for 67 % of each step."),
        ([EXCHANGES, EXCHANGES], "communication-bound: gradients are exchanged for 75 % of each step."),
        ([QUICK, QUICK], "the ranks are in balance."),
    ],
)  # fmt: skip
def test_the_sentences(ranks, says):
    first, second = verdict_text(verdict_of(job(*ranks, steps=400)), NO_ROLES.names)
    assert first.startswith("400 steps, ")
    assert second.startswith(says)


def test_goodput():
    rank = RankProgress(0, 100, seconds=60.0, committing=5.0, recovering=3.0, pausing=10.0, began=1015.0)
    assert goodput_text(goodput_of([rank], 1000.0, 1100.0)) == (
        "goodput 52 % of 100 s: start 15 %, between epochs 10 %, commits 5 %, recovery from lost ranks 3 %, "
        "the rest 15 %."
    )


def test_a_job_says_one_or_the_other():
    stragglers = Stragglers(2, NO_ROLES.names)
    stragglers._now = dict(enumerate(job(QUICK, SLOW)))
    assert [line[:12] for line in last_lines(stragglers, 0.0, 90.0, verdict=True)] == [
        "200 steps, 6", "slowed down ", "goodput 33 %"
    ]  # fmt: skip
    assert last_lines(stragglers, 0.0, 90.0, verdict=False) == []
