"""Elastic jobs under chorosrun, with real kills: who goes on, who is started anew, and what is left behind."""

import signal
import sys
from pathlib import Path

import pytest

from launch.launched import Running, rank_script, run

pytestmark = pytest.mark.slow

RANKS = Path(__file__).with_name("elastic_ranks.py")


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_go_on_and_a_new_rank_takes_the_place(victim):
    ended = run("-np", 3, "--min-np", 2, sys.executable, RANKS, victim, "replace")
    assert (ended.code, ended.out.count("finished with 3")) == (0, 3), ended
    assert f"[{victim}] joined in the place of {victim}\n" in ended.out
    lines = [line for line in ended.err.splitlines() if line.startswith("chorosrun: ")]
    assert lines[0].startswith(f"chorosrun: rank {victim} on ")
    assert lines[0].endswith("was killed by SIGKILL (signal 9): out of memory, or kill -9?; 2 ranks go on.")
    assert lines[1].startswith(f"chorosrun: a new rank {victim} was started on ")
    assert len(lines) == 2


def test_fewer_than_the_least_end():
    ended = run("-np", 3, "--min-np", 2, sys.executable, RANKS, "1,2")
    assert ended.code == 69
    assert "1 of 3 ranks is left, fewer than --min-np 2: the job ends." in ended.err


def test_a_rank_that_raises(tmp_path):
    raises = repr(str(tmp_path / "raises"))
    script = rank_script(
        tmp_path / "a.py",
        f"if rank == 1:\n    open({raises}, 'w').close()\n    raise ValueError('mine')\n"
        f"while not os.path.exists({raises}): time.sleep(0.01)\n"
        "time.sleep(3)\n",
    )
    ended = run("-np", 2, "--min-np", 1, sys.executable, script)
    assert ended.code == 0
    assert "rank 1 on " in ended.err
    assert "failed with exit code 1 (ValueError); 1 rank goes on." in ended.err
    assert ended.err.endswith("ValueError: mine\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted(tmp_path, number):
    body = (
        "import threading\nasked = threading.Event()\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, lambda *_: asked.set())\n"
        "ready()\nwhile not asked.wait(0.1): pass\nprint('committed')\n"
    )
    with Running("-np", 2, "--min-np", 1, sys.executable, rank_script(tmp_path / "a.py", body)) as job:
        job.wait_for(2, "ready")
        job.signal(number)
        ended = job.end()
        job.assert_nothing_left()
    assert (ended.code, ended.out.count("committed")) == (75, 2)
    assert "chorosrun: preempted: the ranks have ended." in ended.err


def test_a_second_signal_kills(tmp_path):
    body = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nready()\ntime.sleep(600)\n"
    with Running("-np", 2, "--min-np", 1, sys.executable, rank_script(tmp_path / "a.py", body)) as job:
        job.wait_for(2, "ready")
        job.signal(signal.SIGUSR1)
        job.signal(signal.SIGTERM)
        job.signal(signal.SIGTERM)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 143
    assert ended.seconds < 15


def test_the_only_rank_that_is_asked_to_end_has_not_finished(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "import os, signal\n"
        "import choros.torch as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while True:\n"
        "        state.commit()\n"
        "train(hvd.elastic.ObjectState())\n"
    )
    ended = run("-np", 1, "--min-np", 1, sys.executable, script)
    assert ended.code == 143, ended
