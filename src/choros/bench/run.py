"""A benchmark run: all contenders in interleaved trials, so that other load on the machine affects all of them.

::

    case A    warm up and size:   choros       mpi4py       torch Gloo
              round 1:            mpi4py       torch Gloo   choros
              round 2:            torch Gloo   choros       mpi4py
              …
    case B    …

One trial runs at a time; the processes of the other contenders block. Each round starts with another contender:
otherwise the cache contents that a trial leaves behind would always affect the same successor. All of it can be
repeated with processes that are started anew: two starts of one job differ by some percent. A contender that fails is
skipped from then on, and the reason is recorded.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from choros.bench.contender import Contender
from choros.bench.figures import Summary, Trial, summarise
from choros.bench.process_group import ContenderFailed, ProcessGroup

__all__ = ["Effort", "RunResult", "Skipped", "rotated", "run_contenders", "units_for"]

T = TypeVar("T")
Case = TypeVar("Case")

_MAX_UNITS = 4000


@dataclass(frozen=True)
class Effort:
    """The amount of work to measure.

    Attributes:
        rounds: the number of trials of each contender and case.
        seconds: the approximate duration of a trial.
        many_runs: whether a trial is many runs of one unit of work, each behind a barrier, rather than one run of
            many units.
        fewest: the least units of work in a trial, whatever they take: a run may have a fixed cost.
        starts: how often all contenders are started, for as many rounds each time.
    """

    rounds: int
    seconds: float
    many_runs: bool
    fewest: int = 1
    starts: int = 1

    def split(self, units: int) -> tuple[int, int]:
        """Returns (runs, units of each run) for a trial of ``units`` units of work."""
        return (units, 1) if self.many_runs else (1, units)


@dataclass(frozen=True)
class Skipped:
    """A contender that was skipped.

    Attributes:
        name: the contender's name.
        since: the case from which on it was skipped, as text to append to the name; empty if all cases were.
        reason: why.
    """

    name: str
    since: str
    reason: str


@dataclass(frozen=True)
class RunResult(Generic[Case]):
    """The result of a benchmark run.

    Attributes:
        summaries: by case and contender's name, of those that completed all rounds.
        skipped: the other contenders.
    """

    summaries: dict[tuple[Case, str], Summary] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def units_for(effort: Effort, trial: Trial) -> int:
    """Returns the number of units of work in a trial, estimated from the time of one unit in ``trial``.

    Example:
        >>> units_for(Effort(rounds=7, seconds=0.02, many_runs=True), Trial(seconds=0.003, cpu_s=0.0))
        7
    """
    return min(_MAX_UNITS, max(effort.fewest, math.ceil(effort.seconds / max(trial.seconds, 1e-9))))


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Returns the items in the order of round ``number``: each round starts with another one.

    Example:
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
    """Starts the contenders, runs all cases in interleaved trials, and ends the contenders.

    Args:
        contenders: those to measure; one that is not installed is skipped.
        cases: the cases to run, in this order; their texts are shown.
        ranks: the number of ranks of each contender.
        effort: the amount of work to measure.
        directory: for the contenders' sockets and output; only this user can enter it.
        show_progress: called with a line of text before each trial.
    """
    result: RunResult[Case] = RunResult()
    trials: dict[tuple[Case, str], list[Trial]] = {}
    for start in range(effort.starts):
        names = [skipped.name for skipped in result.skipped]
        left = [contender for contender in rotated(contenders, start) if contender.name not in names]
        _run_start(left, cases, ranks, effort, directory, result, trials, show_progress)
    wanted = effort.starts * effort.rounds
    result.summaries.update({each: summarise(found) for each, found in trials.items() if len(found) == wanted})
    return result


def _run_start(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    ranks: int,
    effort: Effort,
    directory: Path,
    result: RunResult[Case],
    trials: dict[tuple[Case, str], list[Trial]],
    show_progress: Callable[[str], None],
) -> None:
    with ExitStack() as stack:
        groups = []
        for contender in contenders:
            show_progress(f"starting {contender.name}")
            own = directory / secrets.token_hex(4)
            own.mkdir(mode=0o700)
            group = stack.enter_context(ProcessGroup(contender, ranks, own))
            if _attempt(group, result, "", group.start):
                groups.append(group)
        for case in cases:
            _run_case(case, groups, effort, result, trials, show_progress)
        for group in groups:
            group.request_stop()  # all groups, before waiting for the first to end


def _run_case(
    case: Case,
    groups: list[ProcessGroup],
    effort: Effort,
    result: RunResult[Case],
    trials: dict[tuple[Case, str], list[Trial]],
    show_progress: Callable[[str], None],
) -> None:
    units: dict[ProcessGroup, int] = {}
    for group in groups:
        trials.setdefault((case, group.contender.name), [])

    def warm_up(group: ProcessGroup) -> None:
        units[group] = 1
        group.run(case, *effort.split(1))  # prepares, compiles, connects
        for _ in range(2):
            units[group] = units_for(effort, group.run(case, *effort.split(units[group])))

    def run_trial(group: ProcessGroup) -> None:
        trial = group.run(case, *effort.split(units[group]))
        trials[case, group.contender.name].append(trial)

    for number in range(effort.rounds + 1):
        act, what = (run_trial, f"round {number} of {effort.rounds}") if number else (warm_up, "warming up")
        for group in rotated(groups, number):
            show_progress(f"{case}: {what}, {group.contender.name}")
            if not _attempt(group, result, f", from {case} on", partial(act, group)):
                groups.remove(group)


def _attempt(group: ProcessGroup, result: RunResult[Any], since: str, act: Callable[[], None]) -> bool:
    try:
        act()
    except ContenderFailed as failure:
        result.skipped.append(Skipped(group.contender.name, since, str(failure)))
        group.stop(graceful=False)
        return False
    return True
