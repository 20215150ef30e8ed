"""What is said of the steps of a job: while it runs, which ranks are stragglers; at its end the verdict, where the time
went, what held it back, and what would help by how much. Pure.

::

    rank 0   loads ─ computes ──────── waits ─┐ exchanges      a step lasts as long as the slowest rank's own time,
    rank 1   loads ───────────── computes ────┤ exchanges      the exchange, and what varies from step to step: so one
                                              └ all meet       can tell how long it would last without one of them

Rank 1 is prompt: it finds all others there. Over a period, ranks are stragglers if they were prompt in 80 % of the
steps and waited less than 5 % of the time, while each of the others waited 10 % of it or more and was prompt in at most
half of the steps, and the others are not fewer. A rank that is the last now and then, as it writes a checkpoint or
because times vary, is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low

from choros.observe.progress import PARTS, RankProgress
from choros.wording import number_text, percent_text, seconds_text

#: What a job's time is spent on, in words; steps are what it is for, and what is left is the rest.
GOODPUT = {
    "steps": "steps",
    "start": "start",
    "pauses": "between epochs",
    "commits": "commits",
    "recovery": "recovery from lost ranks",
}
#: Stragglers are found in as many steps; a verdict needs these, and seconds in them.
_FEWEST_STEPS, _FEWEST_SECONDS = 20, 10.0
#: A period is over when each rank has made steps for so many seconds.
_PERIOD = 60.0
_PROMPT_SHARE = 0.8
_OTHERS_PROMPT_SHARE = 0.5
_SHORT_WAIT = 0.05
_LONG_WAIT = 0.1
#: What makes steps less than a tenth faster is no bottleneck.
_LEAST_GAIN = 1.1
#: At least this share of a step is left without its bottleneck.
_LEAST_LEFT = 0.01
#: Batches are small if steps are shorter, and most of it does not depend on the number of rows.
_SHORT_STEP = 0.02
_FIXED_SHARE = 0.5
#: Which can be known once so many steps of all ranks had hardly any rows, or more of them somewhat fewer.
_FEWEST_SMALLER = 16
#: How much larger batches a verdict proposes.
_LARGER = 4
#: A rank that spends this share of the longest time on it is named, too: it may load while it waits for others.
_ALSO = 0.25


@dataclass
class Stragglers:
    """Finds the stragglers of each period, and of the job; ``size``: the ranks at the start, ``name`` names ranks.

    >>> stragglers = Stragglers(2, lambda ranks: f"rank {ranks[0]}")
    >>> stragglers.note(RankProgress(0, steps=100, prompt_steps=3, seconds=60.0, waiting=24.0))
    ''
    >>> stragglers.note(RankProgress(1, steps=100, prompt_steps=98, seconds=60.0, waiting=0.6, loading=40.2))[:72]
    'rank 1 is slower than the others, which waited 40 % of the time for it i'
    """

    size: int
    name: Callable[[Sequence[int]], str]
    _now: dict[int, RankProgress] = field(default_factory=dict)
    _earlier: Mapping[int, RankProgress] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)
    _shown: tuple[int, ...] = ()

    def note(self, done: RankProgress) -> str:
        """Records what a rank has done; returns a sentence if a period is over, and it has new stragglers."""
        self._now[done.rank] = done
        if done.seconds - self._earlier.get(done.rank, RankProgress(done.rank)).seconds < _PERIOD:
            return ""
        self._reported.add(done.rank)
        if len(self._reported) < max(self.size, len(self._now)):
            return ""
        periods = [_since(self._earlier.get(rank, RankProgress(rank)), self._now[rank]) for rank in sorted(self._now)]
        found = _stragglers(periods)
        self._earlier, self._reported = dict(self._now), set()
        if not found or found == self._shown:
            return ""
        self._shown = found
        return self._sentence(found, periods)

    @property
    def progress(self) -> list[RankProgress]:
        """What each rank has done."""
        return [self._now[rank] for rank in sorted(self._now)]

    def of_job(self) -> str:
        """Returns a sentence about the whole job; empty if it has no stragglers."""
        if len(self._now) < self.size:
            return ""
        found = _stragglers(self.progress)
        return self._sentence(found, self.progress) if found and found != self._shown else ""

    def _sentence(self, found: Sequence[int], periods: Sequence[RankProgress]) -> str:
        waited = min(_share(each.waiting, each) for each in periods if each.rank not in found)
        first = next(each for each in periods if each.rank == found[0])
        loading, waiting = _share(first.loading, first), _share(first.waiting, first)
        parts = [f"computed {max(0.0, 1 - loading - waiting):.0%}"]
        parts += [f"loaded data {loading:.0%}"] if loading >= 0.005 else []
        parts += [f"waited {waiting:.0%}"]
        are, them = ("is", "it") if len(found) == 1 else ("are", "them")
        what = ", ".join(parts[:-1]) + f" and {parts[-1]}"
        whose = "It" if len(found) == 1 else f"{self.name(found[:1]).capitalize()}"
        text = (
            f"{self.name(found)} {are} slower than the others, which waited {waited:.0%} of the time for {them} in "
            f"{first.steps} steps ({first.seconds:.0f} s). {whose} {what}"
        )
        return text.replace("%", " %")


def _since(earlier: RankProgress, now: RankProgress) -> RankProgress:
    names = ("steps", "prompt_steps", "seconds", "waiting", "loading")
    return replace(now, **{name: getattr(now, name) - getattr(earlier, name) for name in names})


def _stragglers(periods: Sequence[RankProgress]) -> tuple[int, ...]:
    if min(each.steps for each in periods) < _FEWEST_STEPS:
        return ()
    found = tuple(
        each.rank
        for each in periods
        if each.prompt_steps >= _PROMPT_SHARE * each.steps and _share(each.waiting, each) < _SHORT_WAIT
    )
    others = [each for each in periods if each.rank not in found]
    wait = all(
        _share(each.waiting, each) >= _LONG_WAIT and each.prompt_steps <= _OTHERS_PROMPT_SHARE * each.steps
        for each in others
    )
    return found if wait and 0 < len(found) <= len(others) else ()


def _share(seconds: float, period: RankProgress) -> float:
    return seconds / period.seconds if period.seconds > 0 else 0.0


@dataclass(frozen=True)
class Bottleneck:
    """What holds a job back: ``"input"``, ``"compute"``, ``"exchange"``, ``"commits"`` or ``"batch size"``; on
    ``ranks``, empty: on all. ``share``: of each step; without it, steps would be ``gain`` times as fast.
    """

    cause: str
    ranks: tuple[int, ...]
    share: float
    gain: float


@dataclass(frozen=True)
class Verdict:
    """Where the time of a job's steps went: ``shares`` of a step, by what a rank did; ``step`` in seconds.
    ``bottleneck``: what holds it back, ``None`` if nothing does but computing.
    """

    ranks: int
    steps: int
    step: float
    examples_per_second: float
    shares: Mapping[str, float]
    bottleneck: Bottleneck | None


def verdict_of(progress: Sequence[RankProgress]) -> Verdict | None:
    """The verdict on what all ranks have done; ``None`` if they made too few steps, or not for long enough.

    >>> ranks = [RankProgress(0, 100, 0, 20.0, waiting=9.0, loading=1.0, examples=800.0),
    ...          RankProgress(1, 100, 100, 20.0, loading=10.0, examples=800.0)]
    >>> verdict_of(ranks).bottleneck
    Bottleneck(cause='input', ranks=(1,), share=0.5, gain=2.0)
    """
    members = members_of(progress)
    most = max((each.steps for each in members), default=0)
    if most < _FEWEST_STEPS or fmean(each.seconds for each in members) < _FEWEST_SECONDS:
        return None
    step, examples, shares = means_of(members)
    candidates = [*_parts(members, step), *_small_batches(members, step)]
    found = max((each for each in candidates if each.gain >= _LEAST_GAIN), key=lambda each: each.gain, default=None)
    return Verdict(len(progress), most, step, examples, shares, found)


def members_of(progress: Sequence[RankProgress]) -> list[RankProgress]:
    """The ranks that made at least half of the steps, not those that were lost, or came late."""
    most = max((each.steps for each in progress), default=0)
    return [each for each in progress if 2 * each.steps > most]


def means_of(members: Sequence[RankProgress]) -> tuple[float, float, Mapping[str, float]]:
    """The seconds of a mean step, the examples/s of all ``members``, 0 if they are not known, and what the ``PARTS``
    are of a step.
    """
    step = fmean(each.seconds / each.steps for each in members)
    examples = sum(each.examples / each.seconds for each in members)
    if not any(tells_examples(each.examples, each.steps) for each in members):
        examples = 0.0
    return step, examples, {name: fmean(_mean(each, name) for each in members) / step for name in PARTS}


def tells_examples(examples: float, steps: float) -> bool:
    """Whether a rank has counted examples: loops in which the number of rows is not known count one a step."""
    return examples != steps


def _mean(done: RankProgress, part: str) -> float:
    """The seconds of a rank's mean step that are spent on ``part``."""
    return float(getattr(done, part)) / done.steps


def _own(done: RankProgress) -> float:
    """Those before all meet, without waiting."""
    return _mean(done, "computing") + _mean(done, "loading") + _mean(done, "committing")


def _parts(members: Sequence[RankProgress], step: float) -> list[Bottleneck]:
    """What steps would gain without each of their parts, or if ranks that compute longer than others took as long. What
    varies from step to step varies in proportion to what is left.
    """
    usual = median_low(_mean(each, "computing") for each in members)
    exchange = fmean(_mean(each, "exchanging") for each in members)
    longest_own = max(map(_own, members))
    varies = max(1.0, step / (longest_own + exchange))
    parts: Mapping[str, Callable[[RankProgress], float]] = {
        "input": lambda each: _mean(each, "loading"),
        "compute": lambda each: max(0.0, _mean(each, "computing") - usual),
        "commits": lambda each: _mean(each, "committing"),
    }
    candidates = []
    for cause, part in parts.items():
        without = (max(_own(each) - part(each) for each in members) + exchange) * varies
        without = max(without, _LEAST_LEFT * step)
        longest = max(map(part, members))
        ranks = tuple(each.rank for each in members if part(each) >= _ALSO * longest)
        everywhere = len(ranks) == len(members)
        candidates.append(Bottleneck(cause, () if everywhere else ranks, longest / step, step / without))
    without = max(longest_own * varies, _LEAST_LEFT * step)
    candidates.append(Bottleneck("exchange", (), exchange / step, step / without))
    return candidates


def _small_batches(members: Sequence[RankProgress], step: float) -> list[Bottleneck]:
    """Whether most of a short step does not depend on the number of rows, by least squares over the steps' batches."""
    number, rows, squares, products = (
        sum(values)
        for values in zip(*((each.steps, each.examples, each.squares, each.products) for each in members), strict=True)
    )
    seconds = sum(each.computing + each.loading for each in members)
    spread = number * squares - rows * rows
    if step > _SHORT_STEP or number * spread < _FEWEST_SMALLER * rows * rows:
        return []
    each_row = max(0.0, (number * products - rows * seconds) / spread)
    grows = each_row * rows / number
    fixed = 1 - grows / step
    if fixed < _FIXED_SHARE:
        return []
    return [Bottleneck("batch size", (), fixed, _LARGER * step / (step + (_LARGER - 1) * grows))]


def goodput_of(progress: Sequence[RankProgress], began: float, ended: float) -> dict[str, float]:
    """What a job's time was spent on: its seconds, and shares of them by the names of ``GOODPUT``, of the rank that
    has made the most steps. ``began``, ``ended``: the job, in seconds since 1970.
    """
    rank, seconds = max(progress, key=lambda each: each.steps), ended - began
    steps = rank.seconds - rank.committing - rank.recovering
    spent = (steps, rank.began - began, rank.pausing, rank.committing, rank.recovering)
    shares = (min(1.0, max(0.0, each / seconds)) for each in spent)
    return {"seconds": seconds, **dict(zip(GOODPUT, shares, strict=True))}


def goodput_text(goodput: Mapping[str, float]) -> str:
    """The goodput as a line."""
    shares = {text: goodput[name] for name, text in GOODPUT.items()}
    steps, rest = shares.pop("steps"), 1 - sum(shares.values())
    shares["the rest"] = rest - steps
    said = [f"{text} {percent_text(share)}" for text, share in shares.items() if share >= 0.005]
    rest_text = f": {', '.join(said)}." if said else "."
    return f"goodput {percent_text(steps)} of {seconds_text(goodput['seconds'])}{rest_text}"


def last_lines(stragglers: Stragglers, began: float, ended: float, *, verdict: bool) -> list[str]:
    """What is said at the end of a job: its verdict, if it is wanted and was long enough, or else its stragglers."""
    is_whole = len(stragglers.progress) >= stragglers.size
    found = verdict_of(stragglers.progress) if verdict and is_whole else None
    if found is None:
        return [f"{each}." for each in [stragglers.of_job()] if each]
    return [*verdict_text(found, stragglers.name), goodput_text(goodput_of(stragglers.progress, began, ended))]


def verdict_text(verdict: Verdict, name: Callable[[Sequence[int]], str]) -> list[str]:
    """The verdict as lines; ``name`` names ranks.

    >>> verdict = Verdict(2, 100, 0.2, 80.0, {"computing": 0.45, "loading": 0.55}, Bottleneck("input", (1,), 0.5, 2.0))
    >>> for line in verdict_text(verdict, lambda ranks: f"rank {ranks[0]}"):
    ...     print(line)
    100 steps, 5 steps/s, 80 examples/s; a step: computing 45 %, loading data 55 %.
    input-bound on rank 1: it loads data for 50 % of each step. Loaded in advance, steps would be 2.0 times as fast.
    """
    parts = [f"{PARTS[each]} {percent_text(share)}" for each, share in verdict.shares.items() if share >= 0.005]
    rates = f"{number_text(1 / verdict.step)} steps/s"
    if verdict.examples_per_second:
        rates += f", {number_text(verdict.examples_per_second)} examples/s"
    lines = [f"{verdict.steps:,} steps, {rates}; a step: {', '.join(parts)}."]
    found = verdict.bottleneck
    if found is None:
        lines.append("nothing but computing holds it back." if verdict.ranks == 1 else "the ranks are in balance.")
        return lines
    where = f" on {name(found.ranks)}" if found.ranks else ""
    who = ("it" if len(found.ranks) == 1 else "they") if found.ranks else "ranks"
    s = "s" if who == "it" else ""
    share, gain = percent_text(found.share), f"steps would be {found.gain:.1f} times as fast"
    lines.append(
        {
            "input": f"input-bound{where}: {who} load{s} data for {share} of each step. Loaded in advance, {gain}.",
            "compute": f"slowed down by {name(found.ranks)}: {who} compute{s} {share} of each step longer than others "
            f"do, which wait. If {who} computed as fast, {gain}.",
            "exchange": f"communication-bound: gradients are exchanged for {share} of each step. A faster network, "
            f"compression, overlap or fewer exchanges help: without any, {gain}.",
            "commits": f"held back by commits{where}: they take {share} of each step. With fewer, {gain}.",
            "batch size": f"batches are small: {share} of each step does not depend on the number of rows. Batches "
            f"{_LARGER} times as large would give {found.gain:.1f} times the examples/s.",
        }[found.cause]
    )
    return lines


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The rows of a table as lines: the columns with the numbers ``left`` are aligned to the left, others to the right.

    >>> aligned([["rank", "steps"], ["10", "7"]])
    ['rank  steps', '10        7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [line.rstrip() for line in lines]
