"""Reports of cases that fail on their ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import Job
from ranks import running
from ranks.running import Broken, Report, Running

CASES = "ranks.broken_cases::case_that_"


pytestmark = pytest.mark.slow


@pytest.fixture
def job() -> Iterator[Running]:
    job = Running(Job(2))
    yield job
    job.kill()


def test_cases_run_one_by_one_and_report_their_failures(job: Running) -> None:
    passed = dict.fromkeys(range(2), Report("passed"))
    assert job.run(f"{CASES}passes") == passed
    assert job.run(f"{CASES}is_skipped") == dict.fromkeys(range(2), Report("skipped", "not today"))
    for rank, report in job.run(f"{CASES}is_wrong").items():
        assert report.outcome == "failed"
        assert f"assert [{rank}, 2] == [2, 2]" in report.text
    assert job.run(f"{CASES}passes") == passed
    for report in job.run(f"{CASES}leaves_a_process_set").values():
        assert "the case has left process sets" in report.text
    for report in job.run(f"{CASES}does_not_exist").values():
        assert report.outcome == "failed"


def test_a_rank_that_dies_is_named(job: Running) -> None:
    # The other rank, which is stopped then, may be seen to end first.
    with pytest.raises(Broken, match=r"^rank [01] \(process \d+\) has died\n[^$]*rank 1 on \S+ was killed by SIGKILL"):
        job.run(f"{CASES}kills_one_rank")


def test_a_rank_that_waits_for_a_failed_one_is_stopped(job: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_SECONDS", 2)
    with pytest.raises(Broken) as raised:
        job.run(f"{CASES}is_wrong_on_one_rank")
    failures, _, stack = str(raised.value).partition("rank 0 had not ended 2 s after a rank had failed:\n")
    assert "assert 1 == 0" in failures
    assert "in case_that_is_wrong_on_one_rank" in stack
    assert "_pytest" not in stack
