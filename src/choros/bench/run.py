"""A benchmark run: all contenders in interleaved trials, so that other load on the machine affects all of them.

::

    case A    warm up and size:   choros       mpi4py       torch Gloo
              round 1:            mpi4py       torch Gloo   choros
              round 2:            torch Gloo   choros       mpi4py
              …
    case B    …

One trial runs at a time; other contenders block. Each round starts with another one: otherwise the cache contents
that a trial leaves would always affect the same successor. Two starts of one job differ by some percent: all can
be repeated with new processes. A contender that fails is skipped from then on, and the reason is recorded.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from choros.bench.contender import Contender, ContenderFailed
from choros.bench.figures import Trial, summarise
from choros.bench.process_group import ProcessGroup

T = TypeVar("T")
Case = TypeVar("Case")

_MAX_UNITS = 4000
#: A call of ``fit`` has its own cost; in real training, one call has hundreds of steps.
_FEWEST_IN_A_RUN = 8


@dataclass(frozen=True)
class Effort:
    """The work to measure. A trial takes about ``seconds``: ``many_runs`` of one unit, each behind a barrier, or one
    run of many, which may have a fixed cost. All start ``starts`` times, for ``rounds`` each.
    """

    rounds: int
    seconds: float
    many_runs: bool
    starts: int = 1

    def split(self, units: int) -> tuple[int, int]:
        """Returns (runs, units of each run) for a trial of ``units`` units of work."""
        return (units, 1) if self.many_runs else (1, units)


@final
class RunResult(Generic[Case]):
    """The trials of a run so far, of which each contender makes ``wanted`` a case. ``skipped``: contenders that were
    skipped, each with the case since when, as text to append to its name, empty if in all, and the reason.
    """

    def __init__(self, wanted: int, show_progress: Callable[[str], None]) -> None:
        self.skipped: list[tuple[str, str, str]] = []
        self._wanted = wanted
        self._show_progress = show_progress
        self._trials: dict[tuple[Case, str], list[Trial]] = {}

    @property
    def summaries(self) -> dict[tuple[Case, str], Mapping[str, float]]:
        """The summaries, by case and name, of contenders that completed all rounds."""
        return {each: summarise(found) for each, found in self._trials.items() if len(found) == self._wanted}

    def has_skipped(self, name: str) -> bool:
        """Returns whether a contender was skipped, in a case at least."""
        return any(each == name for each, _, _ in self.skipped)

    def attempt(self, name: str, since: str, act: Callable[[], object]) -> bool:
        """Returns whether a contender can ``act``; if not, it is skipped."""
        try:
            act()
        except ContenderFailed as failure:
            self.skipped.append((name, since, str(failure)))
            return False
        return True

    def interleave(self, case: Case, since: str, rounds: int, trials: Mapping[str, Callable[[int], Trial]]) -> None:
        """Makes each contender's trials of ``case``, given the round's number; round 0 warms up, and is not counted."""
        left = list(trials)

        def make(name: str, number: int) -> None:
            trial = trials[name](number)
            if number:
                self._trials[case, name].append(trial)

        for name in left:
            self._trials.setdefault((case, name), [])
        for number in range(rounds + 1):
            what = f"round {number} of {rounds}" if number else "warming up"
            for name in rotated(left, number):
                self._show_progress(f"{case}: {what}, {name}")
                if not self.attempt(name, since, partial(make, name, number)):
                    left.remove(name)


def units_for(effort: Effort, trial: Trial) -> int:
    """Returns the number of units of work in a trial, estimated from the time of one unit in ``trial``.

    >>> units_for(Effort(rounds=7, seconds=0.02, many_runs=True), Trial(seconds=0.003, cpu_s=0.0))
    7
    """
    fewest = 1 if effort.many_runs else _FEWEST_IN_A_RUN
    return min(_MAX_UNITS, max(fewest, math.ceil(effort.seconds / max(trial.seconds, 1e-9))))


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Returns the items in the order of round ``number``: each round starts with another one.

    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]


def run_contenders(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    ranks: int,
    effort: Effort,
    directory: Path,
    show_progress: Callable[[str], None],
) -> RunResult[Case]:
    """Starts the contenders, skipping those not installed, runs the cases in interleaved trials, and ends them."""
    result: RunResult[Case] = RunResult(effort.starts * effort.rounds, show_progress)
    for start in range(effort.starts):
        with ExitStack() as stack:
            groups: list[ProcessGroup] = []
            for contender in rotated([each for each in contenders if not result.has_skipped(each.name)], start):
                show_progress(f"starting {contender.name}")
                own = directory / secrets.token_hex(4)
                own.mkdir(mode=0o700)
                group = stack.enter_context(ProcessGroup(contender, ranks, own))
                if result.attempt(contender.name, "", partial(_or_stop, group, group.start)):
                    groups.append(group)
            for case in cases:
                left = [group for group in groups if not result.has_skipped(group.contender.name)]
                trials = {group.contender.name: _trial_of(group, case, effort) for group in left}
                result.interleave(case, f", from {case} on", effort.rounds, trials)
            for group in groups:
                group.request_stop()  # all groups, before waiting for the first to end
    return result


def _trial_of(group: ProcessGroup, case: Any, effort: Effort) -> Callable[[int], Trial]:
    """Returns what makes the trials of a case; the first, number 0, finds the units of the others."""
    units = 1

    def trial(number: int) -> Trial:
        nonlocal units
        made = group.run(case, *effort.split(units))
        if number == 0:  # it has prepared, compiled, connected
            for _ in range(2):
                made = group.run(case, *effort.split(units))
                units = units_for(effort, made)
        return made

    return lambda number: _or_stop(group, partial(trial, number))


def _or_stop(group: ProcessGroup, act: Callable[[], T]) -> T:
    try:
        return act()
    except ContenderFailed:
        group.stop(graceful=False)
        raise
