"""The contest, with contenders that are a few lines of Python."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from choros.bench.contender import Contender, check_names, chosen
from choros.bench.figures import Burst
from choros.bench.process_group import ContenderFailed, Team
from choros.bench.run import Effort, Outcome, amount_for, hold
from choros.bench.start import Command
from choros.errors import ConfigError

WORKER = """
import time
from choros.bench.channel import Task, serve

def join():
    return lambda case: Task(lambda units: time.sleep(case * units))

serve(join)
"""
PICKY = WORKER.replace("lambda case: Task", "lambda case: None if case > 0.001 and 1 / 0 else Task")
WRONG = WORKER.replace("case * units)", "case * units), check=lambda: 1 / 0")
DYING = "raise SystemExit('an Error that is its last word')"


def python(name: str, script: str, needs: Sequence[str] = ()) -> Contender:
    def start(ranks: int, worker: Sequence[str]) -> list[Command]:
        return [Command((sys.executable, "-c", script))] * ranks

    return Contender(name, start, "unused", needs=needs)


def contest(tmp_path: Path, *contenders: Contender, many_runs: bool = True) -> Outcome[float]:
    effort = Effort(rounds=3, seconds=0.004, many_runs=many_runs)
    return hold(contenders, [0.001, 0.002], 2, effort, tmp_path, lambda _text: None)


@pytest.mark.parametrize("many_runs", [True, False])
def test_each_gets_its_rounds(tmp_path: Path, many_runs: bool) -> None:
    outcome = contest(tmp_path, python("a", WORKER), python("b", WORKER), many_runs=many_runs)
    assert list(outcome.summaries) == [(0.001, "a"), (0.001, "b"), (0.002, "a"), (0.002, "b")]
    assert all(summary.best_s >= case for (case, _), summary in outcome.summaries.items())
    assert outcome.absences == []
    assert psutil.Process().children(recursive=True) == []


def test_those_that_fail_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    outcome = contest(
        tmp_path,
        python("good", WORKER),
        python("absent", WORKER, needs=["no_such_module"]),
        python("dying", DYING),
        python("wrong", WRONG),
        python("picky", PICKY),
    )
    assert list(outcome.summaries) == [(0.001, "good"), (0.001, "picky"), (0.002, "good")]
    assert [(each.name, each.since, each.reason) for each in outcome.absences] == [
        ("absent", "", "not installed (no_such_module)"),
        ("dying", "", "an Error that is its last word"),
        ("wrong", ", from 0.001 on", "ZeroDivisionError: division by zero"),
        ("picky", ", from 0.002 on", "ZeroDivisionError: division by zero"),
    ]


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    contender = Contender("none", lambda _ranks, _worker: [Command(("no-such-program",))], "unused")
    with Team(contender, 2, tmp_path) as team, pytest.raises(ContenderFailed, match="no command 'no-such-program'"):
        team.start()


def test_a_team_that_is_left_by_an_error_is_ended(tmp_path: Path) -> None:
    stuck = WORKER.replace("serve(join)", "import signal; signal.signal(15, signal.SIG_IGN); serve(join)")
    with contextlib.suppress(KeyboardInterrupt), Team(python("stuck", stuck), 2, tmp_path) as team:
        team.start()
        assert len(psutil.Process().children()) == 2
        raise KeyboardInterrupt
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.parametrize(("seconds", "amount"), [(1e-9, 2), (0.02, 7), (1e9, 4000)])
def test_amounts(seconds: float, amount: int) -> None:
    assert amount_for(Effort(7, seconds, many_runs=True, fewest=2), Burst(0.003, 0.0)) == amount


def test_choros_always_takes_part() -> None:
    everybody = [python(name, WORKER) for name in ("choros", "a", "b")]
    names: Callable[[Sequence[str]], list[str]] = lambda only: [each.name for each in chosen(everybody, only)]  # noqa: E731
    assert names([]) == ["choros", "a", "b"]
    assert names(["b"]) == ["choros", "b"]


def test_unknown_contenders_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no contender 'c' here\. There are: 'a', 'b'\."):
        check_names(["a", "c"], ["a", "b"])
