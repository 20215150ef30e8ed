"""Elastic jobs: their bounds, the hosts that a script prints, and what their end means."""

import re

import pytest

from choros.errors import ConfigError
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.outcome import outcome_of
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.command import plan
from choros.launch.plan.hosts import Host, parse_discovered
from choros.launch.plan.job import Elastic, Limits
from choros.launch.plan.mpi_implementations import MPICH, OPEN_MPI_4, OPEN_MPI_5, Mpirun
from choros.launch.plan.restart import HostHealth
from choros.launch.protocol.frames import Exit, Start
from choros.launch.protocol.wrapper_options import WrapperOptions

KILLED = {"code": 137, "signal": 9}
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no'


def job(printed="", environ=None, **given):
    return Arguments(**given).job(
        ["x"], environ or {}, lambda: frozenset({"a", "b"}), lambda: 0, discover=lambda _: printed
    )


def command(job, implementation=None, **environ):
    mpirun = Mpirun("/bin/mpirun", implementation or OPEN_MPI_5, "")
    return plan(job, mpirun, environ, name="j1", session="/tmp/s", root=False)


def outcome(*exits, size=3, least=2, started=None, **rest):
    starts = {rank: Start(rank, "h", 1) for rank in (range(size) if started is None else started)}
    ends = {end.rank: end for end in exits}
    return outcome_of(JobEnd(size, starts, ends, elastic=Elastic(least, size), **rest), Limits())


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"min_num_proc": 2}, (2, 4)),
        ({"max_num_proc": 8}, (4, 8)),
        ({"min_num_proc": 4, "max_num_proc": 4}, (4, 4)),
    ],
)
def test_bounds(given, bounds):
    elastic = job(num_proc=4, **given).elastic
    assert (elastic.least, elastic.most) == bounds


def test_an_elastic_job_outlives_its_ranks():
    started = command(
        job(num_proc=4, min_num_proc=2, reset_limit=5, commit_dir="/commits", commit_steps=9, env={"A": "1"})
    )
    assert started.argv[1:3] == ("--with-ft", "ulfm")
    assert WrapperOptions.parse(started.argv[-2]).elastic
    variables = {name: value for name, value in started.environ.items() if name != "CHOROS_JOB"}
    assert variables == {
        "A": "1",
        "CHOROS_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "CHOROS_MIN_NP": "2",
        "CHOROS_MAX_NP": "4",
        "CHOROS_ELASTIC_TIMEOUT": "600",
        "CHOROS_RESET_LIMIT": "5",
        "CHOROS_COMMIT_DIR": "/commits",
        "CHOROS_COMMIT_STEPS": "9",
        "OMPI_MCA_coll": "^han",
    }
    assert command(job(num_proc=2, min_num_proc=1), OMPI_MCA_coll="basic").environ["OMPI_MCA_coll"] == "basic"
    assert "--with-ft" not in command(job(num_proc=4)).argv


@pytest.mark.parametrize("implementation", [OPEN_MPI_4, MPICH])
def test_other_implementations_refuse(implementation):
    with pytest.raises(
        ConfigError, match=rf"^/bin/mpirun belongs to {implementation.name}, whose ranks do not outlive"
    ):
        command(job(num_proc=2, min_num_proc=1), implementation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_num_proc": 5}, "--min-np 5: the job starts with fewer ranks, -np 4. Give --min-np <= -np <= --max-np."),
        ({"max_num_proc": 3}, "--max-np 3: the job starts with more ranks, -np 4."),
        ({"min_num_proc": 0}, "--min-np 0: expected a whole number from 1 to"),
        ({"elastic_timeout": 5}, "--elastic-timeout applies only to elastic jobs: add --min-np or --max-np or"),
        ({"reset_limit": 5}, "--reset-limit applies only to elastic jobs"),
        ({"cooldown_range": (1, 2)}, "--blacklist-cooldown-range applies only to elastic jobs"),
        ({"min_num_proc": 1, "cooldown_range": (2, 1)}, "--blacklist-cooldown-range (2, 1): expected two numbers"),
        ({"commit_steps": 2}, "--commit-steps 2: no directory for the commits is given. Add --commit-dir"),
        ({"slots": 2}, "--slots-per-host applies only to hosts of --host-discovery-script."),
        ({"min_num_proc": 1, "ps": 1}, "--ps: a job with parameter servers is not elastic"),
        ({"hosts": "a:4", "host_discovery_script": "s"}, "--hosts and --host-discovery-script both name hosts"),
        ({"host_discovery_script": "s"}, "--host-discovery-script s: it prints no host."),
    ],
)
def test_invalid_arguments(given, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        job(num_proc=4, **given)


def test_a_script_names_the_hosts():
    got = job("a:2\n\nb\n", slots=3, host_discovery_script="s", min_num_proc=2)
    assert got.hosts == (Host("a", 2), Host("b", 3))
    assert (got.size, got.elastic) == (5, Elastic(2, 5, script="s", slots=3))
    with pytest.raises(ConfigError, match=r"^s, line 2 of its output: 'no host' is not `host:slots`\.$"):
        parse_discovered("a\nno host", where="s")


def test_a_host_that_fails_is_left_out_for_longer_and_longer():
    hosts, health = (Host("a"), Host("b")), HostHealth((10, 15))
    for _ in range(2):
        health = health.failed("a", 0.0)
    assert health.usable(hosts, 0.0) == hosts
    health = health.failed("a", 0.0)
    assert (health.usable(hosts, 9.9), health.usable(hosts, 10.0)) == ((Host("b"),), hosts)
    for _ in range(3):
        health = health.failed("a", 100.0)
    assert (health.usable(hosts, 114.9), health.usable(hosts, 115.0)) == ((Host("b"),), hosts)


def test_without_a_range_a_host_is_left_out_for_the_rest():
    health = HostHealth()
    for _ in range(3):
        health = health.failed("a", 0.0)
    assert health.usable((Host("a"),), 1e9) == ()


def test_survivors_finish():
    assert outcome(Exit(1, "h", **KILLED), Exit(0, "h", 0), Exit(2, "h", 0)).exit_code == 0


def test_a_wrapper_that_disappeared_is_named():
    got = outcome(Exit(0, "h", 0), Exit(2, "h", 0))
    assert (got.exit_code, got.lines) == (0, ("chorosrun: rank 1 on h disappeared.",))


def test_too_few_are_left():
    got = outcome(
        Exit(1, "h", **KILLED),
        Exit(0, "h", **KILLED),
        Exit(2, "h", 143, signal=15, stopped=True),
        reason=Reason.TOO_FEW,
    )
    assert got.exit_code == 69
    assert got.lines[0].endswith(
        "1 of 3 ranks is left, fewer than --min-np 2: the job ends. "
        "With --commit-dir, the same command goes on from the last commit."
    )


def test_none_is_left_when_the_last_is_lost_while_a_new_one_is_on_its_way():
    starts = {0: Start(0, "h", 1), 1: Start(1, "h", 2, added=True)}
    ends = {0: Exit(0, "h", **KILLED), 1: Exit(1, "h", 0)}  # chorosrun has ended the new one
    got = outcome_of(JobEnd(2, starts, ends, elastic=Elastic(1, 2)), Limits())
    assert (got.exit_code, "0 of 2 ranks are left, fewer than --min-np 1" in got.lines[0]) == (69, True)


def test_mpirun_is_the_cause_and_not_a_rank_that_was_lost_before():
    stopped = [Exit(rank, "h", **KILLED, stopped=True) for rank in (0, 2)]
    got = outcome(Exit(1, "h", **KILLED), *stopped, mpirun_code=-9)
    assert got.exit_code == 70
    assert got.lines == ("chorosrun: mpirun was killed by SIGKILL (signal 9), and the job with it.",)


def test_a_job_whose_scripts_have_all_ended_has_finished_though_mpirun_crashes():
    got = outcome(Exit(1, "h", **KILLED), mpirun_code=-11, done={0}, newcomers={2})
    assert got.exit_code == 0
    assert got.lines[0].endswith("(signal 11). All scripts had ended: the job has finished.")
    # Not if an exception has ended the script, or the only one left was a new rank that chorosrun has ended.
    lost = Exit(1, "h", **KILLED), Exit(2, "h", **KILLED)
    assert outcome(*lost, mpirun_code=-11, done={0}, crashed={0}).exit_code == 70
    starts = {rank: Start(rank, "h", 1, added=not rank) for rank in range(3)}
    ends = {end.rank: end for end in (*lost, Exit(0, "h", 0))}
    job_end = JobEnd(3, starts, ends, elastic=Elastic(1, 3), mpirun_code=-11, done={0}, newcomers={0})
    assert outcome_of(job_end, Limits()).exit_code == 70


def test_an_exception_is_the_exit_code_of_too_few():
    got = outcome(Exit(1, "h", **KILLED), Exit(0, "h", 1, traceback=TRACEBACK), reason=Reason.TOO_FEW)
    assert (got.exit_code, got.lines[-1]) == (1, TRACEBACK)


def test_preempted():
    ends = [Exit(rank, "h", 0, stopped=True) for rank in range(3)]
    assert outcome(*ends, reason=Reason.TERMINATE, preempted=True).exit_code == 75
    assert outcome(*ends, preempted=True).exit_code == 75
    killed = Exit(2, "h", 137, signal=9, stopped=True)
    assert outcome(*ends[:2], killed, reason=Reason.TERMINATE, preempted=True).exit_code == 143
    late = Exit(2, "h", 143, signal=15, stopped=True)
    assert outcome(*ends[:2], late, reason=Reason.TERMINATE, preempted=True).exit_code == 143
    committed = [Exit(rank, "h", 75, stopped=True) for rank in range(2)]
    assert outcome(*committed, late, reason=Reason.TERMINATE, preempted=True).exit_code == 75
    got = outcome(*committed, killed, reason=Reason.TERMINATE, preempted=True)
    assert (got.exit_code, got.lines[0]) == (75, "chorosrun: rank 2 was killed meanwhile.")
