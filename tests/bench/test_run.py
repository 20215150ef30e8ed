"""A benchmark run, with contenders that are a few lines of Python."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from choros.bench.contender import Contender, ContenderFailed, LaunchCommand, check_names, chosen
from choros.bench.figures import Trial
from choros.bench.process_group import ProcessGroup
from choros.bench.run import Effort, RunResult, run_contenders, units_for
from choros.errors import ConfigError

PROGRAM = """
import time
from choros.bench.channel import Task, serve

def join():
    return lambda case: Task(lambda units: time.sleep(case * units))

serve(join)
"""
PICKY = PROGRAM.replace("lambda case: Task", "lambda case: None if case > 0.001 and 1 / 0 else Task")
WRONG = PROGRAM.replace("case * units)", "case * units), check=lambda: 1 / 0")
DYING = "import os; os.write(2, b'an Error in its last line\\n'); os._exit(1)"


def python(name: str, script: str, needs: Sequence[str] = ()) -> Contender:
    def start(ranks: int, argv: Sequence[str]) -> list[LaunchCommand]:
        return [LaunchCommand((sys.executable, "-c", script))] * ranks

    return Contender(name, start, "unused", needs=needs)


@pytest.fixture
def started() -> Callable[[], set[psutil.Process]]:
    """Returns the children that this process has, with theirs, and did not have before."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: {*psutil.Process().children(recursive=True)} - before


def run(tmp_path: Path, *contenders: Contender, many_runs: bool = True, starts: int = 1) -> RunResult[float]:
    effort = Effort(rounds=3, seconds=0.004, many_runs=many_runs, starts=starts)
    return run_contenders(contenders, [0.001, 0.002], 2, effort, tmp_path, lambda _text: None)


@pytest.mark.parametrize(("many_runs", "starts"), [(True, 1), (False, 2)])
def test_every_contender_runs_all_rounds(
    tmp_path: Path, started: Callable[[], set[psutil.Process]], many_runs: bool, starts: int
) -> None:
    result = run(tmp_path, python("a", PROGRAM), python("b", PROGRAM), many_runs=many_runs, starts=starts)
    assert list(result.summaries) == [(0.001, "a"), (0.001, "b"), (0.002, "a"), (0.002, "b")]
    assert all(summary["best_s"] >= case for (case, _), summary in result.summaries.items())
    assert result.skipped == []
    assert not started()


def test_contenders_that_fail_are_skipped_and_the_others_continue(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        python("good", PROGRAM),
        python("absent", PROGRAM, needs=["no_such_module"]),
        python("dying", DYING),
        python("wrong", WRONG),
        python("picky", PICKY),
    )
    assert list(result.summaries) == [(0.001, "good"), (0.001, "picky"), (0.002, "good")]
    assert result.skipped == [
        ("absent", "", "not installed (no_such_module)"),
        ("dying", "", "an Error in its last line"),
        ("wrong", ", from 0.001 on", "ZeroDivisionError: division by zero"),
        ("picky", ", from 0.002 on", "ZeroDivisionError: division by zero"),
    ]


def test_a_missing_launcher_is_reported(tmp_path: Path) -> None:
    contender = Contender("none", lambda _ranks, _argv: [LaunchCommand(("no-such-program",))], "unused")
    with (
        ProcessGroup(contender, 2, tmp_path) as group,
        pytest.raises(ContenderFailed, match="command not found: 'no-such-program'"),
    ):
        group.start()


def test_the_processes_end_when_the_block_is_left_with_an_error(
    tmp_path: Path, started: Callable[[], set[psutil.Process]]
) -> None:
    stuck = PROGRAM.replace("serve(join)", "import signal; signal.signal(15, signal.SIG_IGN); serve(join)")
    with contextlib.suppress(KeyboardInterrupt), ProcessGroup(python("stuck", stuck), 2, tmp_path) as group:
        group.start()
        assert len(started()) == 2
        raise KeyboardInterrupt
    assert not started()


@pytest.mark.parametrize(
    ("seconds", "many_runs", "units"),
    [(1e-9, True, 1), (1e-9, False, 8), (0.02, True, 7), (0.04, False, 14), (1e9, True, 4000)],
)
def test_units_of_a_trial(seconds: float, many_runs: bool, units: int) -> None:
    assert units_for(Effort(7, seconds, many_runs), Trial(0.003, 0.0)) == units


def test_choros_is_always_selected() -> None:
    contenders = [python(name, PROGRAM) for name in ("choros", "a", "b")]
    names: Callable[[Sequence[str]], list[str]] = lambda only: [each.name for each in chosen(contenders, only)]  # noqa: E731
    assert names([]) == ["choros", "a", "b"]
    assert names(["b"]) == ["choros", "b"]


def test_unknown_contenders_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"unknown contender 'c'\. Expected one of: 'a', 'b'\."):
        check_names(["a", "c"], ["a", "b"])
