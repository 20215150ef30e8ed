"""Stragglers: ranks for which the others wait in nearly every step. Pure.

::

    rank 0   computes ──── waits ───────────┐ step      rank 2 is the last, step after step: it is prompt, as it finds
    rank 1   computes ── waits ─────────────┤           all others there, and they are not
    rank 2   computes ──────────────────────┘

Over a period, ranks are stragglers if they were prompt in 80 % of the steps and waited less than 5 % of the time,
while each of the others waited 10 % of it or more and was prompt in at most half of the steps, and the others are
not fewer. A rank that is the last now and then, as it writes a checkpoint or because times vary, is none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: What the seconds of steps are spent on, in words; ``computing`` is what is left.
PARTS = {
    "computing": "computing",
    "loading": "loading data",
    "waiting": "waiting for other ranks",
    "exchanging": "exchanging gradients",
    "committing": "committing",
    "recovering": "recovering from lost ranks",
}
#: The numbers of ``RankProgress`` that a job's record has over time; the others it has as they are last.
SERIES = ("steps", "examples", "seconds", *list(PARTS)[1:], "pausing", "memory")
#: The format of a job's record.
RECORD_FORMAT = 1
_FEWEST_STEPS = 20
#: A period is over when each rank has made steps for so many seconds.
_PERIOD = 60.0
_PROMPT_SHARE = 0.8
_OTHERS_PROMPT_SHARE = 0.5
_SHORT_WAIT = 0.05
_LONG_WAIT = 0.1


@dataclass(frozen=True)
class RankProgress:
    """What a rank has done since it joined, which chorosrun gets once a second, before its stacks and before its end.
    ``seconds``: in steps, each from one meeting of all ranks to the next one; of these ``waiting`` for other ranks,
    ``loading`` data, ``exchanging`` values, ``committing``, ``recovering`` from the loss of others; ``pausing``:
    between epochs, in no step. ``squares``, ``products``: sums over the steps, of the number of examples squared, and
    times the seconds of computing and loading. ``prompt_steps``: it hardly waited, being among the last. ``began``:
    when it made its first step, in seconds since 1970; ``memory``: its bytes. ``histogram``: how many steps took a
    time, see ``bucket_of``. ``collectives``: by name, how many there were, and the bytes of arrays that this rank has
    given to them. ``last``: the last collective, which all of ``last_size`` ranks had called so many seconds ``ago``;
    ``moves``: its data still move.
    """

    rank: int
    steps: int = 0
    prompt_steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    loading: float = 0.0
    exchanging: float = 0.0
    committing: float = 0.0
    recovering: float = 0.0
    pausing: float = 0.0
    examples: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    began: float = 0.0
    last: str = ""
    ago: float = 0.0
    last_size: int = 0
    moves: bool = False
    memory: int = 0
    histogram: Sequence[int] = ()
    collectives: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def computing(self) -> float:
        """The seconds in steps that are nothing else."""
        spent = self.waiting + self.loading + self.exchanging + self.committing + self.recovering
        return max(0.0, self.seconds - spent)


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
