"""Signals reach the ranks, and no process outlives its job, whichever process is killed."""

import os
import signal
import sys

import psutil
import pytest

from launch.launched import CHOROSRUN, Running, rank_script, run

pytestmark = pytest.mark.slow

PYTHON = sys.executable

#: Prints the signals it receives; at SIGINT and SIGTERM it takes a second to save. It sleeps for moments: of a signal
#: that comes just before a sleep, Python calls the handler after it.
SAVES = """
def handler(number, frame):
    print('got', signal.Signals(number).name, flush=True)
    if number in (signal.SIGINT, signal.SIGTERM):
        time.sleep(1)
        print('saved', flush=True)
        sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, handler)
ready()
while True:
    time.sleep(0.05)
"""
STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
ready()
while True:
    time.sleep(0.05)
"""
IN_MPI = """
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
ready()
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ranks_receive_signals_and_can_save(tmp_path, number, code):
    with Running("-np", "2", PYTHON, rank_script(tmp_path / "s.py", SAVES)) as job:
        job.wait_for(2, "ready")
        if number == signal.SIGINT:
            for user in (signal.SIGUSR1, signal.SIGUSR2):
                job.signal(user)
                job.wait_for(2, f"got {user.name}")
        job.signal(number)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == code
    assert ended.out.count(f"got {number.name}") == 2
    assert ended.out.count("got SIG") == (6 if number == signal.SIGINT else 2)
    assert ended.out.count("saved") == 2
    assert "Traceback" not in ended.err


def test_keyboard_interrupts_are_not_shown(tmp_path):
    with Running("-np", "2", PYTHON, rank_script(tmp_path / "s.py", "ready(); time.sleep(60)")) as job:
        job.wait_for(2, "ready")
        job.signal(signal.SIGINT)
        ended = job.end()
    assert ended.code == 130
    assert "KeyboardInterrupt" not in ended.err
    assert ended.err.endswith("chorosrun: interrupted.\n")


def test_interrupts_reach_a_job_that_a_script_started_with_an_ampersand(tmp_path):
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "sh", *CHOROSRUN)
    script = rank_script(tmp_path / "s.py", "ready(); time.sleep(60)")
    with Running("-np", "2", PYTHON, script, start=ignoring) as job:
        job.wait_for(2, "ready")
        job.signal(signal.SIGINT)
        ended = job.end()
    assert ended.code == 130


#: Rank 1 leaves a collective by its KeyboardInterrupt; rank 0 does not receive it, as it waits in C.
LEAVES = {
    "before data move": "collective(lambda: leave() if rank == 1 else communicator.agree(request))",
    "while data move": "collective(lambda: communicator.agree(request) and (leave() if rank == 1 else reduce()))",
}
IN_COLLECTIVE = """
import threading, numpy, choros
from choros.comm import Reduction, Request
choros.init()
communicator, request = choros.comm.global_process_set.communicator, Request("ours")
rank, numbers = choros.rank(), numpy.ones(1 << 20)
def leave():
    time.sleep(600)
def reduce():
    communicator.reduce_in_place(numbers, Reduction.SUM)
def collective(run):
    if rank == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready()
    communicator.atomic(run)
"""


@pytest.mark.parametrize("body", LEAVES.values(), ids=LEAVES)
def test_a_rank_that_waits_for_one_that_was_interrupted_has_no_grace_period(tmp_path, body):
    script = rank_script(tmp_path / "s.py", IN_COLLECTIVE + body)
    with Running("-np", "2", "--grace-period", "300", PYTHON, script) as job:
        job.wait_for(2, "ready")
        job.signal(signal.SIGINT)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 130
    assert "chorosrun: rank 0 did not end after the first signal and was killed." in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("twice", [False, True])
def test_ranks_that_do_not_end_are_killed(tmp_path, twice):
    grace = "30" if twice else "1"
    body = STUBBORN.replace("signal.SIG_IGN", "lambda *_: print('got', flush=True)") if twice else STUBBORN
    with Running("-np", "2", "--grace-period", grace, PYTHON, rank_script(tmp_path / "s.py", body)) as job:
        job.wait_for(2, "ready")
        job.signal(signal.SIGINT)
        if twice:
            job.wait_for(2, "got")  # signals of one kind do not queue
            job.signal(signal.SIGINT)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 130
    assert ended.seconds < 25
    assert "chorosrun: ranks 0, 1 did not end after the first signal and were killed." in ended.err


def named(job, text):
    return [process for process in job.processes() if any(text in argument for argument in process.cmdline())]


@pytest.mark.parametrize("killed", ["chorosrun", "prterun", "launch/wrapper/__main__.py"])
def test_nothing_is_left_after_a_process_is_killed(tmp_path, killed):
    with Running("-np", "2", PYTHON, rank_script(tmp_path / "s.py", IN_MPI)) as job:
        job.wait_for(2, "ready")
        assert len(job.directories()) == 2
        if killed == "chorosrun":
            victim = psutil.Process(job.process.pid)
        elif killed == "prterun":
            victim = next(p for p in job.processes() if p.name().startswith("prterun"))
        else:
            victim = next(p for p in named(job, killed) if not p.name().startswith("prterun"))
        victim.kill()
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == (-signal.SIGKILL if killed == "chorosrun" else 70), ended.err
    if killed == "prterun":
        assert "chorosrun: mpirun was killed by SIGKILL (signal 9), and the job with it." in ended.err
    elif killed != "chorosrun":
        assert "chorosrun: rank" in ended.err, ended.err


def test_ctrl_c_in_the_terminal_reaches_only_chorosrun(tmp_path):
    """The terminal signals its foreground process group; mpirun and the ranks are in groups of their own."""
    with Running("-np", "2", PYTHON, rank_script(tmp_path / "s.py", SAVES)) as job:
        job.wait_for(2, "ready")
        groups = [os.getpgid(process.pid) for process in job.processes()]
        assert os.getpgid(job.process.pid) not in groups
        assert len(set(groups)) == 5  # mpirun, two wrappers, two ranks
        job.signal(signal.SIGTERM)
        assert job.end().code == 143


#: A chorosrun that gets SIGTERM when it is about to remove the directories of a job.
SIGNALLED_AT_THE_END = """
import os, signal
from contextlib import contextmanager
from choros.launch.driver import launcher
directories = launcher.job_directories
@contextmanager
def signalled():
    with directories() as made:
        try:
            yield made
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
launcher.job_directories = signalled
from choros.launch.cli import main
main()
"""
KILLS_MPIRUN = "ready()\nimport psutil\npsutil.Process().parents()[1].kill()\ntime.sleep(600)\n"


@pytest.mark.parametrize(
    ("flags", "body", "code", "says"),
    [((), "ready()", 0, ""), (("--min-np", "1"), KILLS_MPIRUN, 75, "chorosrun: preempted while it waited for hosts.")],
    ids=["it has ended", "it would be started again"],
)
def test_a_signal_between_the_end_of_the_ranks_and_that_of_chorosrun(tmp_path, flags, body, code, says):
    start = (PYTHON, "-P", "-c", SIGNALLED_AT_THE_END)
    ended = run("-np", "1", *flags, PYTHON, rank_script(tmp_path / "s.py", body), start=start)
    assert (ended.code, ended.out.count("ready")) == (code, 1), ended.err
    assert says in ended.err
