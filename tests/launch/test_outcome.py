"""The outcome of a job: messages and exit codes."""

import pytest

from choros import durations
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.outcome import exception_name, explain, outcome_of
from choros.launch.driver.stopping import first_signal
from choros.launch.plan.job import Elastic, Limits
from choros.launch.plan.roles import Roles
from choros.launch.protocol.frames import Exit, Start

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no'
STOPPED = {"code": 143, "signal": 15, "stopped": True}


def job_end(*exits, size=3, reason=Reason.FAILURE, started=None, **rest):
    starts = range(size) if started is None else started
    return JobEnd(
        size, {rank: Start(rank, "h", 1) for rank in starts}, {end.rank: end for end in exits}, reason, **rest
    )


def outcome(*exits, **rest):
    return outcome_of(job_end(*exits, **rest), Limits(run=5))


def test_success():
    assert outcome(*(Exit(rank, "h", 0) for rank in range(3)), reason=None).exit_code == 0


def test_the_first_failure_comes_last():
    got = outcome(Exit(1, "b", 1, traceback=TRACEBACK), Exit(0, "a", **STOPPED), Exit(2, "c", **STOPPED))
    assert got.exit_code == 1
    assert got.lines == (
        "chorosrun: rank 1 on b failed with exit code 1 (ValueError); the other 2 ranks were stopped.",
        TRACEBACK,
    )


def test_a_rank_that_has_lost_another_is_not_the_cause():
    lost = TRACEBACK.replace("ValueError", "choros.errors.PeerLostError")
    loser, killed = Exit(0, "h", 69, traceback=lost), Exit(1, "h", 137, signal=9)
    got = outcome(loser, killed, size=2)
    assert got.lines[0] == "chorosrun: rank 0 failed too: PeerLostError."
    assert (got.exit_code, "rank 1 on h was killed by SIGKILL" in got.lines[1]) == (137, True)
    raised = Exit(1, "h", 143, signal=15, stopped=True, traceback=TRACEBACK)  # it has not ended until it was stopped
    got = outcome(loser, raised, size=2)
    assert got.exit_code == 1
    assert got.lines[1:] == ("chorosrun: rank 1 on h failed with exit code 1 (ValueError).", TRACEBACK)
    assert outcome(loser, Exit(1, "h", **STOPPED), size=2).lines[-1] == lost


def test_later_failures_have_one_line_for_each_kind():
    other = TRACEBACK.replace("ValueError", "choros.errors.MismatchError")
    got = outcome(
        *(Exit(rank, "h", 1, traceback=TRACEBACK if rank == 3 else other) for rank in (2, 0, 3)),
        Exit(1, "h", **STOPPED),
        size=4,
    )
    assert got.lines == (
        "chorosrun: rank 0 failed too: MismatchError.",
        "chorosrun: rank 3 failed too: ValueError.",
        "chorosrun: rank 2 on h failed with exit code 1 (MismatchError); 1 other rank was stopped.",
        other,
    )


def test_an_exit_code():
    got = outcome(Exit(0, "h", 3, tail="last\nwords"), Exit(1, "h", **STOPPED), size=2)
    assert got.exit_code == 3
    assert got.lines == (
        "chorosrun: rank 0 on h failed with exit code 3; the other rank was stopped.",
        "Its last lines on standard error:\nlast\nwords",
    )


@pytest.mark.parametrize(("number", "message"), [(9, "SIGKILL (signal 9): out of memory"), (11, "SIGSEGV (signal 11)")])
def test_killed(number, message):
    got = outcome(Exit(0, "h", 128 + number, signal=number), size=1)
    assert got.exit_code == 128 + number
    assert f"was killed by {message}" in got.lines[0]


def test_a_traceback_that_was_shown_is_not_shown_again():
    got = outcome(Exit(0, "h", 1, shown="Traceback (most recent call last):\n  x\nValueError: no", tail="x"), size=1)
    assert got.lines[-1] == "chorosrun: its traceback is above."


def test_a_rank_that_waits_for_one_that_has_ended():
    end = Exit(1, "h", 0), Exit(0, "h", 143, signal=15, stopped=True)
    got = outcome(*end, size=2, reason=Reason.STUCK, stuck="rank 0 waits in barrier(), and rank 1 has ended")
    assert got.exit_code == 70
    assert got.lines == ("chorosrun: rank 0 waits in barrier(), and rank 1 has ended; the job was stopped.",)


def test_a_rank_that_failed_before_init_is_the_cause_of_an_elastic_job_that_waits_for_it():
    ends = Exit(1, "h", 3), Exit(0, "h", 143, signal=15, stopped=True)
    end = {"size": 2, "reason": Reason.STUCK, "stuck": "rank 0 waits in init()", "elastic": Elastic(1, 2)}
    got = outcome(*ends, **end, initialized={0})
    assert (got.exit_code, got.failure) == (3, ends[0])
    assert outcome(*ends, **end, initialized={0, 1}).exit_code == 70  # it was survived, and is not why they wait


def test_a_job_that_is_stopped_from_outside_says_who_waited_for_whom():
    waits = ("rank 0 has waited 9 s for rank 1 in barrier()",)
    got = outcome(Exit(0, "h", 0), size=1, reason=Reason.TIMEOUT, waits=waits)
    assert got.lines[0] == "chorosrun: rank 0 has waited 9 s for rank 1 in barrier()."


def test_a_command_that_does_not_exist():
    got = outcome(Exit(0, "h", 127, problem="command not found: 'x'."), Exit(1, "h", 127, problem="…"), size=2)
    assert got.exit_code == 127
    assert got.lines == ("chorosrun: on h, command not found: 'x'.",)


@pytest.mark.parametrize(("reason", "code"), [(Reason.INTERRUPT, 130), (Reason.TERMINATE, 143), (Reason.TIMEOUT, 124)])
def test_stopped_from_outside(reason, code):
    interrupted = TRACEBACK.replace("ValueError: no", "KeyboardInterrupt")
    got = outcome(
        Exit(0, "h", 130, stopped=True, traceback=interrupted), Exit(1, "h", 0, stopped=True), size=2, reason=reason
    )
    assert got.exit_code == code
    assert len(got.lines) == 1


def test_ranks_that_were_killed_are_named():
    got = outcome(Exit(0, "h", 137, signal=9, stopped=True), Exit(1, "h", 0), size=2, reason=Reason.TERMINATE)
    assert got.lines[0] == "chorosrun: rank 0 did not end after the first signal and was killed."


def test_a_failure_during_shutdown_is_shown():
    got = outcome(Exit(0, "h", 1, stopped=True, traceback=TRACEBACK), size=1, reason=Reason.TERMINATE)
    assert TRACEBACK in got.lines


def test_mpirun_that_cannot_start():
    got = outcome(
        reason=None, started=(), messages=["----", "There are not enough slots available", "----"], mpirun_code=1
    )
    assert got.exit_code == 70
    assert got.lines[0].startswith(
        "chorosrun: mpirun could not start ranks 0, 1, 2. mpirun found fewer slots than ranks"
    )
    assert got.lines[0].endswith("There are not enough slots available")


def test_a_slow_start():
    got = outcome(Exit(0, "h", **STOPPED), started=(0,), reason=Reason.START_TIMEOUT)
    assert (got.exit_code, got.lines) == (70, ("chorosrun: ranks 1, 2 did not start within --start-timeout 30 s.",))


def test_a_lost_host():
    got = outcome(Exit(0, "h", **STOPPED), Exit(1, "h", 0), reason=None, mpirun_code=1)
    assert got.exit_code == 70
    assert got.lines[0].startswith("chorosrun: rank 2 on h disappeared")


def test_a_lost_host_that_mpirun_names():
    got = outcome(reason=None, messages=["  Remote host:   h", "…"], mpirun_code=1)
    assert got.lines == ("chorosrun: ranks 0, 1, 2 on h disappeared: the host went down or can no longer be reached.",)


#: A chief, a ps and two workers.
ROLES = {"roles": Roles(servers=1, workers=2), "size": 4}


def test_the_chief_decides():
    got = outcome(Exit(0, "h", 0), Exit(1, "h", 0), Exit(2, "h", 0), Exit(3, "h", 0), reason=None, **ROLES)
    assert (got.exit_code, got.lines) == (0, ())


def test_failures_after_the_chiefs_end_are_shown():
    got = outcome(
        Exit(0, "h", 0), Exit(1, "h", **STOPPED), Exit(2, "h", 1, traceback=TRACEBACK), reason=Reason.DONE, **ROLES
    )
    assert got.exit_code == 0
    assert got.lines == (
        "chorosrun: after the chief had ended, worker 0 on h failed with exit code 1 (ValueError).",
        TRACEBACK,
        "chorosrun: ps 0, worker 1 did not end within 20 s after the chief and were stopped.",
    )


def test_a_chief_that_fails():
    got = outcome(Exit(0, "h", 3), *(Exit(rank, "h", **STOPPED) for rank in (1, 2, 3)), **ROLES)
    assert got.exit_code == 3
    assert got.lines == ("chorosrun: the chief on h failed with exit code 3; the other 3 processes were stopped.",)


def test_a_failure_before_the_chiefs_success_is_a_failure():
    got = outcome(Exit(2, "h", 3), Exit(0, "h", 0, stopped=True), Exit(1, "h", 0), Exit(3, "h", 0), **ROLES)
    assert (got.exit_code, got.lines[-1][:40]) == (3, "chorosrun: worker 0 on h failed with exi")


def test_the_failure_of_a_ps_is_the_cause_of_others():
    got = outcome(Exit(3, "h", 1), Exit(0, "h", 1, traceback=TRACEBACK), Exit(1, "h", 5), Exit(2, "h", 0), **ROLES)
    assert got.exit_code == 5
    assert got.lines == (
        "chorosrun: the chief failed too: ValueError.",
        "chorosrun: worker 1 failed too: exit code 1.",
        "chorosrun: ps 0 on h failed with exit code 5.",
        "chorosrun: its shard of the variables is lost: start the job again from the last checkpoint.",
    )


def test_a_signal_is_a_cause():
    got = outcome(Exit(0, "h", 1), Exit(2, "h", 137, signal=9, restarts=3), Exit(1, "h", 0), Exit(3, "h", 0), **ROLES)
    assert got.exit_code == 137
    assert got.lines[1].startswith("chorosrun: worker 0 on h was killed by SIGKILL")
    assert got.lines[2] == "chorosrun: this was restart 3; --max-restarts allows no more."


FATAL = [
    "[h:0] *** An error occurred in Socket closed",
    "[h:0] *** reported by process [91,0]",
    "*** MPI_ERRORS_ARE_FATAL",
]


def test_a_rank_that_mpi_aborted_is_not_the_cause():
    got = outcome(Exit(0, "h", 14), Exit(2, "h", 7), Exit(1, "h", **STOPPED), messages=FATAL)
    assert got.exit_code == 7
    assert got.lines[-1] == "chorosrun: rank 2 on h failed with exit code 7; 1 other rank was stopped."


def test_a_silent_abort_of_mpi_is_not_the_cause_of_an_exception():
    raised = Exit(2, "h", 1, traceback=TRACEBACK)
    for silent in (Exit(0, "h", 14), Exit(0, "h", 14, tail="why")):
        assert ("rank 0 on h failed" in outcome(silent, raised).lines[-2]) == bool(silent.tail)
    assert outcome(Exit(0, "h", 14), Exit(1, "h", **STOPPED), size=2).exit_code == 14


def test_an_error_of_mpi_is_shown_if_nothing_else_explains_it():
    got = outcome(Exit(0, "h", 14), Exit(1, "h", **STOPPED), size=2, messages=FATAL)
    assert got.lines[-1].startswith("MPI aborted because of an error. mpirun's messages:\n  [h:0] *** An error")


def test_mpi_abort_shows_the_ranks_traceback():
    got = outcome(
        Exit(1, "h", **STOPPED, traceback=TRACEBACK), Exit(0, "h", **STOPPED), reason=None, size=2, mpirun_code=5
    )
    assert got.lines[-1] == TRACEBACK


@pytest.mark.parametrize(
    ("traceback", "name"),
    [
        (TRACEBACK, "ValueError"),
        (TRACEBACK.replace("ValueError: no", "KeyboardInterrupt"), "KeyboardInterrupt"),
        (TRACEBACK.replace("ValueError", "a.b.Custom"), "Custom"),
        (TRACEBACK + "\n\nDuring handling …:\n\n" + TRACEBACK.replace("ValueError", "OSError"), "OSError"),
        (TRACEBACK + "\nWARNING: leaked semaphores", "ValueError"),
        ("", ""),
        ("no traceback", ""),
    ],
)
def test_exception_names(traceback, name):
    assert exception_name(traceback) == name


def test_nothing_to_explain():
    assert explain(["-----", ""]) == ""
    assert "gave no reason" in outcome(reason=None, started=(), mpirun_code=1).lines[0]


def test_the_signals_of_a_stop():
    firsts = {reason: first_signal(reason, 20) for reason in Reason}
    assert {reason: first and first[0].name for reason, first in firsts.items()} == {
        Reason.FAILURE: "SIGTERM",
        Reason.STUCK: "SIGTERM",
        Reason.OVER: "SIGTERM",
        Reason.TOO_FEW: "SIGTERM",
        Reason.LOST: "SIGTERM",
        Reason.DONE: "SIGTERM",
        Reason.INTERRUPT: "SIGINT",
        Reason.TERMINATE: "SIGTERM",
        Reason.TIMEOUT: "SIGTERM",
        Reason.START_TIMEOUT: None,
    }
    assert firsts[Reason.INTERRUPT][1] == 20
    assert firsts[Reason.FAILURE][1] + durations.KILL_GRACE < 5
