"""What chorosrun does when an elastic job has lost mpirun, a host or a link: computed, without processes."""

import os
import signal

import pytest

from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.outcome import loss_of, outcome_of
from choros.launch.driver.restarts import launch_again
from choros.launch.plan.hosts import parse_hosts
from choros.launch.plan.job import Elastic, Job, Limits
from choros.launch.plan.restart import JobLoss, Tries, cut_off, moved, next_step, restarted
from choros.launch.protocol.frames import Exit, Start

ELASTIC = Elastic(least=2, most=4, timeout=60.0, resets=5)
JOB = Job(("x",), 4, parse_hosts("10.0.0.1:2,10.0.0.2:2"), elastic=ELASTIC)
STOPPED = {"code": 143, "signal": 15, "stopped": True}
KILLED = {"code": 137, "signal": 9}
DAEMON_LOST = "  Remote host:   b"
KEPT_BY_MPI = "a rank was lost while MPI connected a new one, and MPI waits for it: this rank ends."
HOST_LOST = "ranks 2, 3 on b were lost: the host went down or can no longer be reached"


def unreachable(rank, others):
    said = f"choros.errors.PeerLostError: the host 10.0.0.9 of ranks {others} cannot be reached any more."
    return Exit(rank, "ab"[rank // 2], 69, tail=said)


def end(*exits, reason=None, messages=(), started=range(4), **rest):
    starts = {rank: Start(rank, "ab"[rank // 2], 1) for rank in started}
    job_end = JobEnd(4, starts, {each.rank: each for each in exits}, reason, elastic=ELASTIC, **rest)
    job_end.messages.extend(messages)
    return job_end


@pytest.mark.parametrize(
    ("job_end", "loss"),
    [
        (
            end(Exit(0, "a", **STOPPED), Exit(1, "a", **STOPPED), messages=[DAEMON_LOST], mpirun_code=213),
            JobLoss(
                "ranks 2, 3 on b were lost: the host went down or can no longer be reached", frozenset({"10.0.0.2"})
            ),
        ),
        (end(mpirun_code=-9), JobLoss("mpirun was killed by SIGKILL (signal 9)")),
        (
            end(*(Exit(rank, "a", **STOPPED) for rank in range(4)), mpirun_code=-9),
            JobLoss("mpirun was killed by SIGKILL (signal 9)"),
        ),
        (
            end(unreachable(0, "2, 3"), unreachable(3, "0, 1"), Exit(1, "a", **STOPPED), reason=Reason.LOST),
            JobLoss(
                "the hosts 10.0.0.1, 10.0.0.2 have lost each other",
                cut=frozenset({("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1")}),
            ),
        ),
        (
            end(Exit(2, "b", **KILLED), Exit(3, "b", **KILLED), Exit(0, "a", 69), Exit(1, "a", 69), reason=Reason.LOST),
            JobLoss("ranks 2, 3 on b were lost, and not more than half of all are left"),
        ),
        (
            end(reason=Reason.STUCK, stuck="…", unconnected=True),
            JobLoss(
                "the hosts 10.0.0.1, 10.0.0.2 have lost each other",
                cut=frozenset({("10.0.0.1", "10.0.0.2")}),
                started=False,
            ),
        ),
        (
            end(Exit(0, "a", 0), Exit(1, "a", **STOPPED), messages=[DAEMON_LOST], done={0}),  # it was asked to leave
            JobLoss(
                "ranks 2, 3 on b were lost: the host went down or can no longer be reached", frozenset({"10.0.0.2"})
            ),
        ),
        (end(started=[0, 1], mpirun_code=1), JobLoss("ranks 2, 3 could not be started", started=False)),
    ],
)
def test_losses(job_end, loss):
    assert loss_of(job_end, restarted(JOB, JOB.hosts, 1, (), {})) == loss


@pytest.mark.parametrize(
    "job_end",
    [
        end(*(Exit(rank, "a", 0) for rank in range(4))),
        end(Exit(2, "b", **KILLED), *(Exit(rank, "a", 0) for rank in (0, 1, 3))),
        end(*(Exit(rank, "a", 0) for rank in (0, 1, 3))),
        end(Exit(0, "a", 0), messages=[DAEMON_LOST], done={0, 1, 2, 3}),
        end(*(Exit(rank, "a", 0) for rank in (0, 1, 3)), mpirun_code=-11, done={0, 1, 2, 3}),
        end(*(Exit(rank, "a", 69, tail=KEPT_BY_MPI) for rank in (1, 2, 3)), Exit(0, "a", 0), together={0}),
        end(Exit(0, "a", **KILLED), Exit(1, "a", **STOPPED), mpirun_code=-11, done={2, 3}, newcomers={1}),
        end(*(Exit(rank, "a", **KILLED) for rank in (0, 1, 2)), Exit(3, "b", **STOPPED), reason=Reason.TOO_FEW),
        end(*(Exit(rank, "a", 1, traceback="ValueError") for rank in range(4)), reason=Reason.TOO_FEW),
        end(*(Exit(rank, "a", **STOPPED) for rank in range(4)), reason=Reason.TERMINATE),
        end(Exit(0, "a", 0, stopped=True), reason=Reason.TERMINATE, preempted=True),
        end(Exit(0, "a", 3), messages=["[a:00000] *** reported by process [917831681,0]"], mpirun_code=3),
    ],
)
def test_no_losses(job_end):
    assert loss_of(job_end, JOB) is None


def test_a_first_start_that_fails_is_not_repeated():
    assert loss_of(end(started=[0, 1], mpirun_code=1), JOB) is None


@pytest.mark.parametrize(
    ("tries", "hosts", "waited", "step"),
    [
        (Tries(), "b:2", 0, (2, parse_hosts("b:2"))),
        (Tries(), "b:2,c:8", 0, (4, parse_hosts("b:2,c:8"))),
        (Tries(), "b:1", 59, None),
        (Tries(), "b:1", 60, "after --elastic-timeout 60 s there are slots for 1 rank, fewer than --min-np 2"),
        (Tries(restarts=5), "b:2", 0, "--reset-limit 5 allows no further start"),
        (Tries(2, in_vain=3), "b:2", 0, "the last 3 starts have failed"),
    ],
)
def test_steps(tries, hosts, waited, step):
    found = next_step(JOB, ELASTIC, tries, parse_hosts(hosts), waited)
    assert (started(JOB, found) if isinstance(found, tuple) else found) == step


def started(job, step):
    """With how many ranks it is started again, and where."""
    again = restarted(job, step, 1, (), {})
    return again.size, again.hosts


def test_starts_in_vain_are_counted_until_one_succeeds():
    tries = Tries(restarts=2).after(JobLoss("…", started=False)).after(JobLoss("…", started=False))
    assert tries == Tries(restarts=2, in_vain=2)
    assert tries.after(JobLoss("…")) == Tries(restarts=2)


def test_hosts_that_have_lost_each_other_are_left_out_only_if_they_still_have_at_the_next_start():
    """The link may be up again, and it is not known whose link it was."""
    pair = frozenset({("a", "b")})
    tries = Tries().after(JobLoss("…", cut=pair))
    assert (tries.cut, tries.suspected) == (frozenset(), pair)
    everyone = frozenset({("a", "b"), ("a", "c"), ("b", "c")})  # of a start in vain no more is known
    assert tries.after(JobLoss("…", cut=everyone, started=False)).cut == pair
    assert Tries().after(JobLoss("…", cut=everyone, started=False)).cut == everyone


def test_hosts_are_left_out_that_turn_out_to_be_apart_in_a_start_without_those_that_were_known_to_be():
    """A rank tells the first host that it does not reach, and ends."""
    told, everyone = frozenset({("a", "b"), ("b", "c")}), frozenset({("a", "b"), ("a", "c"), ("b", "c")})
    tries = Tries().after(JobLoss("…", cut=told)).after(JobLoss("…", cut=everyone, started=False))
    hosts = parse_hosts("a:1,b:2,c:1")
    assert cut_off(hosts, tries.cut) == {"b"}
    tries = tries.after(JobLoss("…", cut=frozenset({("a", "c")}), started=False))
    assert (tries.cut, cut_off(hosts, tries.cut)) == (everyone, {"a", "c"})


def test_a_restarted_job():
    job = Job(("x",), 4, environment={"CHOROS_CHAOS": "kill:rank=1@step=2"}, elastic=ELASTIC)
    again = restarted(job, parse_hosts("a:1,b:2"), 2, {"a"}, {"HOROVOD_TIMELINE": "/t/run.json"})
    assert again.environment == {"CHOROS_RESTARTS": "2", "HOROVOD_TIMELINE": "/t/run.restart2.json"}
    assert (again.size, again.remote) == (3, parse_hosts("b:2"))


@pytest.mark.parametrize(
    ("hosts", "step"),
    [
        ("b:1,a:2", None),
        ("a:2", (2, parse_hosts("a:2"))),
        ("a:2,b:2", (4, parse_hosts("a:2,b:2"))),
        ("b:4", (4, parse_hosts("b:4"))),
        ("a:1,c:1", (2, parse_hosts("a:1,c:1"))),
        ("a:1", None),  # fewer than the least: it goes on as long as it can
    ],
)
def test_hosts_that_come_and_go(hosts, step):
    job = Job(("x",), 3, parse_hosts("a:2,b:1"), elastic=ELASTIC)
    found = moved(job, ELASTIC, parse_hosts(hosts))
    assert (found and started(job, found)) == step


@pytest.mark.parametrize(
    ("cut", "out"),
    [("", ""), ("ab", "b"), ("ab bc", "b"), ("ab bc ac", "bc"), ("ax", ""), ("cd", "d")],
)
def test_hosts_that_are_cut_off(cut, out):
    assert cut_off(parse_hosts("a:3,b:2,c:2,d:1"), {tuple(pair) for pair in cut.split()}) == frozenset(out)


def test_given_up():
    outcome = outcome_of(end(given_up="a was lost; the job ends: why"), Limits())
    assert outcome.exit_code == 69
    assert outcome.lines == (
        "chorosrun: a was lost; the job ends: why. With --commit-dir, the same command goes on from the last commit.",
    )


@pytest.mark.parametrize("within", [False, True], ids=["between two launches", "in one that is lost"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_job_that_is_asked_to_end_is_not_started_again(within, number):
    launches, preempted = [], number != signal.SIGHUP

    def launch(*given):
        launches.append(given)
        if not within:
            os.kill(os.getpid(), number)
        return end(mpirun_code=-9, asked=number)

    job_end = launch_again(JOB, ELASTIC, Limits(), launch, print)
    assert len(launches) == 1
    assert (job_end.reason, job_end.preempted, job_end.members) == (Reason.TERMINATE, preempted, set())
    assert outcome_of(job_end, Limits()).exit_code == (75 if preempted else 143)


def test_a_job_whose_hosts_change_and_change_back_while_it_ends_goes_on_there():
    committed = [Exit(rank, "ab"[rank // 2], 75) for rank in range(4)]
    ends = [end(*committed, moves=True), end(*(Exit(rank, "ab"[rank // 2], 0) for rank in range(4)))]
    launched = []

    def launch(job, *_):
        launched.append((job.size, job.hosts))
        return ends[len(launched) - 1]

    assert outcome_of(launch_again(JOB, ELASTIC, Limits(), launch, print), Limits()).exit_code == 0
    assert launched == [(4, JOB.hosts)] * 2
