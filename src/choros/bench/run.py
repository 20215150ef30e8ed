"""The contest: all contenders, in turns, so that whatever else the machine does meets all of them.

::

    case A    warm up and size:   choros       mpi4py       torch Gloo
              round 1:            mpi4py       torch Gloo   choros
              round 2:            torch Gloo   choros       mpi4py
              …
    case B    …

One burst at a time; the others' processes block. Each round another one is first: what a burst leaves in the
caches would otherwise meet the same one every time. A contender that fails is noted with the reason and takes
no further part.
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
from choros.bench.figures import Burst, Summary, summarise
from choros.bench.process_group import ContenderFailed, Team

__all__ = ["Absence", "Effort", "Outcome", "amount_for", "hold"]

Case = TypeVar("Case")

_MOST = 4000


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: how often each contender gets its turn.
        seconds: how long a turn is to last, about.
        many_runs: a turn is many runs of one unit of work, each begun together, rather than one run of many.
        fewest: units of work in a turn, however long they take: a run may cost something by itself.
    """

    rounds: int
    seconds: float
    many_runs: bool
    fewest: int = 1

    def split(self, amount: int) -> tuple[int, int]:
        """(runs, units of each) of a turn with so much work."""
        return (amount, 1) if self.many_runs else (1, amount)


@dataclass(frozen=True)
class Absence:
    """A contender that did not take part, or from some case on: who, since when (in words), and why."""

    name: str
    since: str
    reason: str


@dataclass(frozen=True)
class Outcome(Generic[Case]):
    """What came of a contest.

    Attributes:
        summaries: by case and contender's name, those that went through all rounds.
        absences: the others.
    """

    summaries: dict[tuple[Case, str], Summary] = field(default_factory=dict)
    absences: list[Absence] = field(default_factory=list)


def amount_for(effort: Effort, burst: Burst) -> int:
    """How many units of work make a turn, by what one took in ``burst``.

    Example:
        >>> amount_for(Effort(rounds=7, seconds=0.02, many_runs=True), Burst(seconds=0.003, cpu_s=0.0))
        7
    """
    return min(_MOST, max(effort.fewest, math.ceil(effort.seconds / max(burst.seconds, 1e-9))))


def hold(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    ranks: int,
    effort: Effort,
    directory: Path,
    say: Callable[[str], None],
) -> Outcome[Case]:
    """Starts the contenders, has them run all cases in turns, and ends them.

    Args:
        contenders: who takes part; those that are not installed are among the absences.
        cases: what is run, one after another; their texts are shown.
        ranks: how many ranks each contender has.
        effort: how much.
        directory: for the contenders' sockets and output; only this user can enter it.
        say: is told what is going on.
    """
    outcome: Outcome[Case] = Outcome()
    with ExitStack() as stack:
        teams = []
        for contender in contenders:
            say(f"starting {contender.name}")
            own = directory / secrets.token_hex(4)
            own.mkdir(mode=0o700)
            team = stack.enter_context(Team(contender, ranks, own))
            if _attempt(team, outcome, "", team.start):
                teams.append(team)
        for case in cases:
            _run_case(case, teams, effort, outcome, say)
        for team in teams:
            team.dismiss()  # all, before the first is waited for
    return outcome


def _run_case(
    case: Case, teams: list[Team], effort: Effort, outcome: Outcome[Case], say: Callable[[str], None]
) -> None:
    amounts: dict[Team, int] = {}
    bursts: dict[Team, list[Burst]] = {team: [] for team in teams}

    def warm_up(team: Team) -> None:
        amount = 1
        team.run(case, *effort.split(amount))  # prepares, compiles, connects
        for _ in range(2):
            amount = amount_for(effort, team.run(case, *effort.split(amount)))
        amounts[team] = amount

    def turn(team: Team) -> None:
        bursts[team].append(team.run(case, *effort.split(amounts[team])))

    for number in range(effort.rounds + 1):
        act, what = (turn, f"round {number} of {effort.rounds}") if number else (warm_up, "warming up")
        first = number % max(1, len(teams))
        for team in [*teams[first:], *teams[:first]]:
            say(f"{case}: {what}, {team.contender.name}")
            if not _attempt(team, outcome, f", from {case} on", partial(act, team)):
                teams.remove(team)
    for team in teams:
        outcome.summaries[case, team.contender.name] = summarise(bursts[team])


def _attempt(team: Team, outcome: Outcome[Any], since: str, act: Callable[[], None]) -> bool:
    try:
        act()
    except ContenderFailed as failure:
        outcome.absences.append(Absence(team.contender.name, since, str(failure)))
        team.stop(polite=False)
        return False
    return True
