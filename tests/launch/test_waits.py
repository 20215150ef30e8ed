"""Ranks that wait for others: what chorosrun concludes, and what it says."""

import signal
import sys

import pytest

from choros.observe.events import INIT, LEAVING, SHUTDOWN, Event, Kind
from choros.observe.waits import Stall, Waits
from launch.launched import Running, rank_script, run

ALL = (0, 1, 2)


def waiting(call, ranks=ALL, at="", time=0.0):
    return Event(Kind.WAITING, call, time=time, details={"process_set": ranks, "at": at})


def joined(size=3):
    """A job whose ranks have called init()."""
    waits = Waits(size)
    for rank in range(size):
        assert not waits.note(rank, waiting(INIT, tuple(range(size))), 0.0)
        waits.note(rank, Event(Kind.WAITED, INIT), 0.0)
    return waits


def test_a_rank_that_has_ended_is_missed_by_one_that_still_waits_a_moment_later():
    waits = joined()
    assert not waits.note(0, waiting("barrier()", at="train.py:3", time=5.0), 5.0)
    assert not waits.ended(1, 6.0)
    assert not waits.note(
        0, waiting("barrier()", time=6.1), 6.1
    )  # it may not have noticed yet that the barrier is over
    assert waits.note(0, waiting("barrier()", time=7.5), 7.5).startswith(
        "rank 0 waits in barrier() at train.py:3, and rank 1 ended with exit code 0 without leaving the job"
    )


def test_a_rank_that_ended_before_init_is_missed_at_once():
    waits = Waits(2)
    assert not waits.note(0, waiting(INIT, (0, 1)), 0.0)
    assert "rank 1 ended with exit code 0 before it called init()" in waits.ended(1, 0.1)
    waits = Waits(2)
    assert not waits.ended(1, 0.1)
    assert "before it called init()" in waits.note(0, waiting(INIT, (0, 1)), 0.2)


def test_a_rank_that_has_left_is_not_missed():
    waits = joined(2)
    waits.note(1, waiting(LEAVING, (0, 1)), 1.0)
    waits.note(0, waiting(LEAVING, (0, 1)), 1.0)
    waits.note(1, Event(Kind.WAITED, LEAVING), 1.1)
    assert not waits.ended(1, 1.2)
    assert not waits.note(0, waiting(LEAVING, (0, 1), time=9.0), 9.0)


def test_a_rank_that_computes_is_not_missed():
    waits = joined(3)
    for now in (1.0, 100.0):
        assert not waits.note(0, waiting("barrier()", time=now), now)
        assert not waits.note(1, waiting(SHUTDOWN, time=now), now)


def test_a_rank_that_ended_is_not_missed_by_those_that_do_not_wait_for_it():
    waits = joined(3)
    waits.ended(2, 1.0)
    for now in (1.0, 100.0):
        assert not waits.note(0, waiting("barrier()", (0, 1), time=now), now)


def test_ranks_that_wait_for_each_other():
    waits = joined(3)
    found = [
        waits.note(rank, waiting(f"allreduce(name={rank})", ranks, time=now), now)
        for now in (1.0, 2.5)
        for rank, ranks in enumerate(((0, 1), (1, 2), (0, 2)))
    ]
    assert found[:3] == ["", "", ""]
    assert found[3] == (
        "ranks wait for each other: rank 0 in allreduce(name=0); rank 1 in allreduce(name=1); "
        "rank 2 in allreduce(name=2)"
    )


def test_different_calls_of_the_same_ranks_end_by_an_error():
    waits = joined(2)
    for now in (1.0, 100.0):
        assert not waits.note(0, waiting("barrier()", (0, 1), time=now), now)
        assert not waits.note(1, waiting(SHUTDOWN, (0, 1), time=now), now)


def test_a_set_of_ranks_that_was_too_long_to_send_counts_as_all():
    waits = joined(2)
    waits.ended(1, 1.0)
    found = [waits.note(0, Event(Kind.WAITING, "barrier()", time=now), now) for now in (9.0, 10.5)]
    assert found[0] == ""
    assert "rank 1 ended" in found[1]


def test_a_long_wait_is_shown_once():
    waits = joined()
    assert waits.next_stall(0.0) is None
    waits.note(0, waiting(SHUTDOWN), 10.0)
    waits.note(2, waiting(SHUTDOWN), 20.0)
    assert waits.stalls(69.0) == []
    assert waits.next_stall(69.0) == 1.0
    assert waits.stalls(70.0) == [Stall("rank 0 has waited 60 s for rank 1 in shutdown()", (1,), 10.0)]
    assert waits.stalls(81.0) == []  # rank 2 waits in the same call
    assert (waits.stalls(999.0), waits.next_stall(999.0)) == ([], None)
    assert waits.lines(100.0) == ["ranks 0, 2 have waited 90 s for rank 1 in shutdown()"]
    waits.note(1, waiting(SHUTDOWN), 101.0)
    assert waits.lines(102.0) == []


def test_a_rank_that_does_not_end_after_its_script():
    waits = joined(3)
    waits.note(1, Event(Kind.SCRIPT_ENDED), 10.0)
    waits.note(0, waiting(SHUTDOWN), 11.0)
    assert waits.next_stall(70.0) == 1.0  # that of rank 0: rank 2 still computes
    waits.note(2, Event(Kind.SCRIPT_ENDED), 20.0)
    waits.note(2, waiting(SHUTDOWN), 21.0)
    assert waits.stalls(69.0) == []
    assert waits.next_stall(69.0) == 1.0
    lines = waits.stalls(90.0)
    assert lines[0].text == "ranks 0, 2 have waited 79 s for rank 1 in shutdown()"
    assert lines[1].text.startswith("rank 1 has not ended, 80 s after its script: a handler at exit, a thread that is")
    assert waits.doing(1) == "has ended its script"
    assert (waits.stalls(309.0), waits.too_long(309.0), waits.next_stall(309.0)) == ([], "", 1.0)
    assert waits.too_long(310.0).startswith(
        "rank 1 did not end within --exit-timeout 300 s after the script: a handler"
    )


def test_what_is_said_of_a_rank_is_not_that_of_the_one_whose_place_it_takes():
    waits = Waits(2)
    waits.note(0, Event(Kind.SCRIPT_ENDED), 1.0)
    waits.note(1, Event(Kind.SCRIPT_ENDED), 1.0)
    assert [stall.missing for stall in waits.stalls(100.0)] == [(0,), (1,)]
    waits.ended(1, 101.0, "failed with exit code 1")
    assert waits.doing(1) == "failed with exit code 1"
    waits.forget(1)
    assert waits.doing(1) == ""
    waits.note(1, Event(Kind.SCRIPT_ENDED), 110.0)
    assert [stall.missing for stall in waits.stalls(200.0)] == [(1,)]


def test_a_rank_that_does_not_end_when_all_others_have():
    waits = Waits(2, exit_seconds=5)
    waits.note(0, Event(Kind.SCRIPT_ENDED), 1.0)
    assert waits.next_stall(2.0) is None
    waits.ended(1, 2.0)
    assert (waits.next_stall(2.0), waits.too_long(6.9)) == (5.0, "")
    assert "rank 0 did not end" in waits.too_long(7.0)


def test_several_ranks_that_do_not_end_are_stopped_when_the_last_one_is_late():
    waits = Waits(3, exit_seconds=5)
    waits.ended(2, 0.0)
    waits.note(0, Event(Kind.SCRIPT_ENDED), 1.0)
    waits.note(1, Event(Kind.SCRIPT_ENDED), 4.0)
    assert (waits.too_long(6.0), waits.next_stall(6.0)) == ("", 3.0)
    assert waits.too_long(9.0).startswith("ranks 0, 1 did not end within")


def test_a_rank_whose_other_threads_train_is_not_one_that_does_not_end():
    waits = Waits(2)
    waits.ended(1, 0.0)
    waits.note(0, Event(Kind.SCRIPT_ENDED), 1.0)
    waits.note(0, waiting("allreduce()", (0,), time=2.0), 2.0)
    waits.note(0, Event(Kind.WAITED, "allreduce()"), 3.0)
    assert (waits.too_long(999.0), waits.next_stall(999.0)) == ("", None)


@pytest.mark.parametrize("size", [1, 2])
def test_when_no_rank_ends_they_may_take_their_time(size):
    waits = Waits(size)
    for rank in range(size):
        assert waits.next_stall(0.0) is None
        waits.note(rank, Event(Kind.SCRIPT_ENDED), 1.0)
    assert (waits.too_long(999.0), waits.stalls(60.0), waits.next_stall(60.0)) == ("", [], 1.0)
    lines = waits.stalls(61.0)
    assert [line.text.split(",")[0] for line in lines] == [f"rank {rank} has not ended" for rank in range(size)]
    assert lines[0].text.endswith("does not return. Ctrl-C ends the job, as does --exit-timeout after its time")
    assert (waits.stalls(999.0), waits.next_stall(999.0)) == ([], None)


def test_when_the_first_of_them_ends_the_others_have_time():
    waits = Waits(2)
    for rank in range(2):
        waits.note(rank, Event(Kind.SCRIPT_ENDED), 1.0)
    waits.stalls(61.0)
    waits.ended(0, 900.0)
    assert (waits.too_long(1199.0), waits.next_stall(1199.0)) == ("", 1.0)
    assert waits.too_long(1200.0).startswith("rank 1 did not end within --exit-timeout 300 s after the script: a")


def test_when_no_rank_ends_they_are_stopped_on_request():
    waits = Waits(2, exit_seconds_of_all=100)
    for rank in range(2):
        waits.note(rank, Event(Kind.SCRIPT_ENDED), 1.0 + rank)
    waits.stalls(62.0)
    assert (waits.too_long(101.9), waits.next_stall(101.0)) == ("", 1.0)
    assert waits.too_long(102.0).startswith("ranks 0, 1 did not end within --exit-timeout 100 s after the script: a")


def test_a_rank_that_has_not_yet_reported_its_wait_is_not_one_that_does_not_end():
    waits = Waits(2, exit_seconds=0.5, exit_seconds_of_all=0.5)
    for rank in range(2):
        waits.note(rank, Event(Kind.SCRIPT_ENDED), 1.0)
    assert waits.too_long(1.6) == ""
    waits.note(0, waiting(SHUTDOWN), 2.1)
    assert waits.too_long(2.1).startswith("rank 1 did not end within --exit-timeout 0.5 s")


SCRIPTS = {
    "ends in the job": (
        2,
        "c.allreduce(numpy.ones(4))\nif rank == 1: os._exit(0)\nc.allreduce(numpy.ones(4), name='loss')",
        "rank 0 waits in allreduce(name='loss', op=Average, dtype=float64, shape=(4,)) at ",
        "rank 1 ended with exit code 0 without leaving the job, as os._exit() does; the job was stopped.",
    ),
    "two sets": (
        3,
        "s = choros.add_process_set([0, 1])\nif rank == 0: s.communicator.barrier(name='ours')",
        "ranks wait for each other: rank 0 in barrier(name='ours') at ",
        "; rank 1 in shutdown() at the end of its script; ",  # and rank 2, if it has come that far
    ),
}
INITIALISED = "import choros, numpy\nchoros.init()\nc = choros.comm.global_process_set.communicator\n"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "body", "who", "whom"), SCRIPTS.values(), ids=SCRIPTS)
def test_ranks_that_can_never_continue_are_stopped(tmp_path, size, body, who, whom):
    ended = run("-np", size, sys.executable, rank_script(tmp_path / "script.py", INITIALISED + body))
    assert ended.code == 70, ended.err
    assert who in ended.err
    assert whom in ended.err
    assert ended.err.rstrip().endswith("the job was stopped.")


@pytest.mark.slow
def test_a_job_whose_scripts_have_ended_has_finished_although_a_rank_did_not_leave(tmp_path):
    body = INITIALISED + "choros.shutdown()\nif rank == 1: os._exit(0)"
    ended = run("-np", 2, sys.executable, rank_script(tmp_path / "script.py", body))
    assert ended.code == 0, ended.err
    assert "rank 0 waits in MPI_Finalize(), and rank 1 ended with exit code 0 without leaving the job" in ended.err
    assert "All scripts had ended: the job has finished." in ended.err


#: Rank 1 does not end, before or after it has left the job.
LINGERING = {
    "handler": INITIALISED + "import atexit\nif rank == 1: atexit.register(time.sleep, 600)",
    "handler that runs when it has left": "import atexit\nif rank == 1: atexit.register(time.sleep, 600)\n"
    + INITIALISED,
    "destructor": INITIALISED
    + "import ctypes\nlibc = ctypes.CDLL(None)\nif rank == 1: libc.__cxa_atexit(libc.pause, None, None)",
    "thread, and an exception": INITIALISED
    + "import threading\nif rank == 1: threading.Thread(target=time.sleep, args=(600,)).start()\n"
    + "if rank == 1: raise ValueError('cause')",
}


@pytest.mark.slow
@pytest.mark.parametrize("body", LINGERING.values(), ids=LINGERING)
def test_a_rank_that_does_not_end_is_stopped(tmp_path, body):
    ended = run("-np", 2, "--exit-timeout", 0.5, sys.executable, rank_script(tmp_path / "script.py", body))
    assert ended.code == 70, ended.err
    assert "chorosrun: rank 1 did not end within --exit-timeout 0.5 s after the script: a handler at exit" in ended.err
    assert ("ValueError: cause" in ended.err) == ("cause" in body)


@pytest.mark.slow
def test_a_job_none_of_whose_ranks_ends_is_stopped(tmp_path):
    body = INITIALISED + "import atexit\natexit.register(time.sleep, 600)"
    ended = run("-np", 1, "--exit-timeout", 5, sys.executable, rank_script(tmp_path / "script.py", body))
    assert ended.code == 70, ended.err
    assert "chorosrun: rank 0 did not end within --exit-timeout 5 s after the script" in ended.err


@pytest.mark.slow
def test_a_rank_that_ends_before_init(tmp_path):
    body = "if rank == 1: sys.exit(0)\n" + INITIALISED
    ended = run("-np", 2, sys.executable, rank_script(tmp_path / "script.py", body))
    assert ended.code == 70
    assert "rank 0 waits in init() at " in ended.err
    assert "rank 1 ended with exit code 0 before it called init(); the job was stopped." in ended.err


@pytest.mark.slow
def test_init_again_when_another_rank_has_left(tmp_path):
    body = INITIALISED + "choros.shutdown()\nif rank == 1: sys.exit(0)\nchoros.init()"
    script = rank_script(tmp_path / "script.py", body)
    ended = run("-np", 2, "--log-level", "debug", sys.executable, script)
    assert ended.code == 1
    assert "EngineError: init() was called again, but rank 1 of 2 ended after shutdown()." in ended.err
    assert "[0] rank crashed: EngineError" in ended.err


@pytest.mark.slow
def test_an_interrupted_job_says_who_waited_for_whom(tmp_path):
    body = INITIALISED + "if rank == 0: c.barrier(name='late')\nelse: signal.pause()"
    script = rank_script(tmp_path / "script.py", body)
    with Running("-np", 2, "--log-level", "debug", sys.executable, script) as job:
        seen = ""
        while "[0] waiting: barrier(name='late')" not in seen:
            line = job.process.stderr.readline()
            assert line, seen
            seen += line
        job.signal(signal.SIGINT)
        ended = job.end()
    assert ended.code == 130
    assert "s for rank 1 in barrier(name='late') at " in ended.err


def test_a_wait_that_is_shown_earlier_or_never():
    waits = Waits(2, stall_seconds=5.0)
    waits.note(0, waiting("allreduce", (0, 1)), now=0.0)
    assert (waits.stalls(4.9), waits.next_stall(4.0)) == ([], 1.0)
    assert waits.stalls(5.0) == [Stall("rank 0 has waited 5 s for rank 1 in allreduce", (1,), 0.0)]
    waits = Waits(2, stall_seconds=0.0)
    waits.note(0, waiting("allreduce", (0, 1)), now=0.0)
    assert (waits.stalls(999.0), waits.next_stall(999.0)) == ([], None)


def test_a_wait_that_takes_too_long():
    waits = Waits(2, stall_seconds=0.0, stall_shutdown_seconds=9.0)
    waits.note(0, waiting("allreduce", (0, 1)), now=0.0)
    assert (waits.too_long(8.9), waits.next_stall(8.0)) == ("", 1.0)
    assert waits.too_long(9.5) == (
        "rank 0 has waited 10 s for rank 1 in allreduce, longer than CHOROS_STALL_SHUTDOWN_SECONDS=9"
    )
    waits.note(1, waiting("allreduce", (0, 1), time=9.0), now=9.0)  # it has come: the wait ends by itself
    assert (waits.too_long(9.5), waits.next_stall(9.5)) == ("", 8.5)
    assert waits.too_long(18.5).startswith("ranks 0, 1 have been in allreduce for 10 s, and it does not end, longer")


def test_a_wait_of_all_ranks_of_which_nothing_is_known_is_reported():
    """As where mpirun is stopped, and all are in ``MPI_Finalize()``, or one in ``init()`` blocks the others there."""
    waits = joined(2)
    for rank, now in ((0, 10.0), (1, 30.0)):
        waits.note(rank, waiting("MPI_Finalize()", (0, 1)), now)
    assert (waits.stalls(89.0), waits.next_stall(89.0)) == ([], 1.0)
    text = "ranks 0, 1 have been in MPI_Finalize() for 60 s, and it does not end"
    assert waits.stalls(90.0) == [Stall(text, (0, 1), 30.0, matched=True)]
    assert (waits.stalls(200.0), waits.next_stall(200.0)) == ([], None)


def test_a_call_that_all_have_made_and_that_does_not_end():
    """Wrappers report it: the ranks wait in C, or are stopped."""
    waits = Waits(2, stall_seconds=5.0, stall_shutdown_seconds=9.0)
    details = {"seconds": 5.0, "matched": 2}
    waits.note(0, Event(Kind.WAITING, "allreduce", details=details), now=5.0)
    assert [stall.missing for stall in waits.stalls(5.0)] == [(0, 1)]
    waits.note(1, Event(Kind.WAITING, "allreduce", details=details), now=5.1)
    assert waits.stalls(6.0) == []
    assert waits.doing(1) == "is in allreduce"
    assert (waits.next_stall(8.0), waits.next_stall(10.0)) == (1.0, 0.0)
    assert waits.too_long(9.0) == (
        "ranks 0, 1 have been in allreduce for 9 s, and it does not end, longer than CHOROS_STALL_SHUTDOWN_SECONDS=9"
    )
    for rank in (0, 1):
        waits.note(rank, Event(Kind.WAITED, "allreduce"), now=11.0)
    assert waits.too_long(99.0) == ""


def test_whom_an_elastic_job_goes_on_without():
    waits = Waits(4, stall_shutdown_seconds=9.0, elastic=True)
    waits.note(0, waiting("allreduce", (0, 1)), now=0.0)
    waits.note(1, waiting("of another set", (1, 2)), now=0.0)
    assert waits.culprits(8.9, stopped=()) == []
    assert waits.culprits(9.0, stopped=()) == [2]  # rank 1 waits itself, and rank 3 is not missed
    assert waits.culprits(9.0, stopped=(1,)) == [1, 2]
    assert not waits.ended(2, 9.1, "failed with exit code 137")
    assert waits.culprits(18.0, stopped=()) == []  # ranks have time to go on
    waits.note(0, Event(Kind.WAITED, "allreduce"), now=20.0)
    waits.note(1, Event(Kind.WAITED, "of another set"), now=20.0)
    in_a_set, matched = ({"seconds": 9.0, "matched": ranks} for ranks in (2, 3))
    waits.note(3, Event(Kind.WAITING, "allreduce of a set", details=in_a_set), now=20.0)
    assert waits.next_stall(20.0) is None
    waits.note(3, Event(Kind.WAITING, "allreduce", details=matched), now=20.0)
    assert (waits.culprits(20.0, stopped=()), waits.culprits(20.0, stopped=(1, 2))) == ([], [1])
