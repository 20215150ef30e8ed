"""``choros bench start``: its commands, its trials, its table."""

import os
import sys
from pathlib import Path

import pytest

from choros.bench.contender import Contender, LaunchCommand
from choros.bench.report import compare, plain_text
from choros.bench.startup import CASES, NOTES, measure, row, run_starts, sections

#: An earlier test of this process may have used JAX, which warns of each fork; Popen starts a program at once.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


def python(code: str) -> LaunchCommand:
    return LaunchCommand((sys.executable, "-I", "-S", "-c", code))


def case(**programs: str) -> list[Contender]:
    return [Contender(name, lambda _ranks, argv: [python(argv[1])], ["-c", code]) for name, code in programs.items()]


def test_every_case_has_choros_first() -> None:
    assert [programs[0].name for programs in CASES.values()] == ["choros"] * 3
    for programs in CASES.values():
        for program in programs:
            (command,) = program.start(2, program.argv)
            assert program.argv[-1] in command.argv


def test_nothing_is_imported_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "choros.py").write_text("raise SystemExit('a module of another user')")
    monkeypatch.chdir(tmp_path)
    measure(LaunchCommand((sys.executable, "-c", "import choros")))


def test_a_trial_lasts_until_the_end() -> None:
    assert measure(python("import time; time.sleep(0.2)")).seconds > 0.2


def test_a_trial_has_the_cpu_time_of_its_command_alone() -> None:
    def cpu_seconds() -> float:
        return os.times().children_user + os.times().children_system

    earlier = cpu_seconds()
    trials = [measure(python(f"import time\nwhile time.process_time() < {seconds}: pass")) for seconds in (0.2, 0.1)]
    assert trials[0].cpu_s >= 0.18  # in ticks of 10 ms
    assert trials[1].cpu_s >= 0.08
    assert sum(trial.cpu_s for trial in trials) == pytest.approx(cpu_seconds() - earlier)


def test_a_failure_has_a_reason() -> None:
    with pytest.raises(RuntimeError, match="ValueError: no"):
        measure(python("raise ValueError('no')"))


def test_rounds_are_interleaved_and_failures_are_skipped() -> None:
    shown: list[str] = []
    cases = {"nothing": case(choros="pass", fails="1/0", other="pass")}
    result = run_starts(cases, ["choros", "fails"], 2, 2, shown.append)
    assert [text.rpartition(", ")[2] for text in shown] == ["choros", "fails", "choros", "choros"]
    assert [(name, reason) for name, _, reason in result.skipped] == [("fails", "ZeroDivisionError: division by zero")]
    assert list(result.summaries) == [("nothing", "choros")]


def test_an_import_has_one_rank() -> None:
    made = [row(2, case, "choros", {"best_s": 0.5}) for case in CASES]
    about = {"bench": "start", "peer": "choros", "best_s": 0.5}
    assert made == [{**about, "ranks": ranks, "case": case} for ranks, case in zip((2, 2, 1), CASES, strict=True)]


def test_the_table() -> None:
    measured = [
        row(2, "nothing", "choros", {"best_s": 0.5, "median_s": 0.6, "cpu_s": 0.7}),
        row(2, "nothing", "torchrun", {"best_s": 2.0, "median_s": 3.0, "cpu_s": 1.4}),
    ]
    text = plain_text(compare("start to end", sections(measured), notes=NOTES))
    assert "nothing, 2 processes" in text
    assert "4.00" in text
    assert "5.00" in text
