"""Polling of a rank that waits, and its cost on real ranks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from choros import durations
from choros.comm.waiting import sleep_after, wait_until
from choros.observe import events
from choros.observe.events import REPORTS, Kind
from comm.engines import ON_TORCH
from harness import CHOROSRUN, Job, check_case, on

MODULE = "comm.waiting_cases"
MPI = "comm.mpi_waiting_cases"


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits sleep from the first poll on."""
    monkeypatch.setattr(durations, "SPIN", 0.0)


def test_sleeps_grow_with_the_time_waited() -> None:
    waits = [sleep_after(waited, longest=2.0) for waited in (0, 1e-4, 1, 19, 21, 1000)]
    assert waits == pytest.approx([2e-5, 2e-5, 0.1, 1.9, 2, 2])


@pytest.mark.parametrize("polls", [1, 2, 70, 300])
def test_poll_is_called_until_it_is_true(polls: int, sleeping: None) -> None:
    answers = iter([False] * (polls - 1) + [True])
    wait_until(lambda: next(answers))
    assert next(answers, None) is None


def test_error_of_a_poll_is_raised(sleeping: None) -> None:
    answers = iter([False] * 100)
    with pytest.raises(StopIteration):
        wait_until(lambda: next(answers))


@pytest.mark.parametrize("shared", [True, False])
def test_long_yields_show_that_the_core_is_shared(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(itertools.count(0.0, 1e-3 if shared else 1e-6))  # of the clock, which advances in yields alone
    monkeypatch.setattr("choros.comm.waiting.time.perf_counter", lambda: next(seconds))
    answers = iter([False] * 100 + [True])
    assert wait_until(lambda: next(answers)) is shared


@pytest.mark.slow
def test_a_wait_of_a_second_polls_about_a_thousand_times(sleeping: None) -> None:
    polls = 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        return time.monotonic() > end

    end = time.monotonic() + 1
    wait_until(poll)
    assert polls < 2000


@pytest.mark.slow
@on(Job(2), ON_TORCH, cases=MODULE)
def test_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.slow
@on(Job(2), cases=MPI)
def test_ranks_of_mpi(case: str, job: Job) -> None:
    check_case(MPI, case, job)


ARRIVES_LATE = """
import os, time
import choros
for step in (choros.init, choros.shutdown):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(3)
        step()
    else:
        before = time.process_time()
        step()
        print(step.__name__, time.process_time() - before)
"""


@pytest.mark.slow
def test_rank_that_joins_or_leaves_early_waits_at_little_cost() -> None:
    command = [CHOROSRUN, "-np", "2", "--no-prefix-output", sys.executable, "-c", ARRIVES_LATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seconds = {name: float(spent) for name, spent in map(str.split, done.stdout.splitlines())}
    # Starting and ending MPI take some of it.
    assert max(seconds["init"], seconds["shutdown"]) < 1.5


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
import choros
end = pathlib.Path(sys.argv[1])
choros.init()
communicator = choros.global_process_set.communicator
if choros.rank() == 1:
    while not end.exists():
        time.sleep(0.05)
    os._exit(0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    communicator.allreduce(1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    communicator.allreduce(1)
except choros.MismatchError as error:
    print(error, flush=True)
end.touch()
os._exit(0)
"""


@pytest.mark.slow
def test_interrupted_rank_stops_waiting_and_cannot_communicate(tmp_path: Path) -> None:
    command = [CHOROSRUN, "-np", "2", "--no-prefix-output", sys.executable, "-c", INTERRUPTED, str(tmp_path / "end")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "interrupted" in done.stdout, done.stdout + done.stderr
    assert "was interrupted on this rank, which cannot communicate any more" in done.stdout


def test_a_long_wait_is_reported_at_growing_intervals(monkeypatch: pytest.MonkeyPatch, sleeping: None) -> None:
    monkeypatch.setattr(durations, "FIRST_REPORT", 0.001)
    monkeypatch.setattr(durations, "NEXT_REPORT", 0.1)
    received: list[events.Event] = []
    stop = events.listen(received.append, REPORTS)
    wait_until(lambda: len(received) > 2, lambda: ("barrier()", (0, 1)))
    stop()
    assert [event.kind for event in received] == [Kind.WAITING] * (len(received) - 1) + [Kind.WAITED]
    assert received[0].details["process_set"] == (0, 1)
    assert Path(__file__).name in str(received[0].details["at"])
    waited = [float(str(event.details["seconds"])) for event in received[:-1]]
    assert waited == sorted(waited)


def test_a_wait_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "FIRST_REPORT", 0.001)
    received: list[events.Event] = []
    stop = events.listen(received.append, REPORTS)

    def poll() -> bool:
        if received:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        wait_until(poll, lambda: ("barrier()", (0, 1)))
    stop()
    assert [event.kind for event in received] == [Kind.WAITING, Kind.WAITED]
