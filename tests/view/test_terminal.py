"""The live view in a real terminal, beside real jobs."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

from launch.launched import CHOROSRUN, Running, rank_script
from view.terminals import Terminal, needs_tmux

pytestmark = [pytest.mark.slow, needs_tmux, pytest.mark.xdist_group("view")]

#: Two ranks make steps, in which rank 1 loads and rank 0 waits for it, until the file ``end`` exists.
STEPS = """
import choros
from choros.observe.progress import page
choros.init()
choros.comm.global_process_set.communicator.barrier()
ready()
page.note_step(8)
while not os.path.exists('end'):
    page._step_began -= 0.9
    page.waited, page.loaded = (0.8, 0.0) if rank == 0 else (0.0, 0.8)
    page.note_step(8)
    print('tick', flush=True)
    time.sleep(0.1)
print('ended well', flush=True)
"""
TOP = (sys.executable, "-P", "-m", "choros", "top")
AFTER = "; echo code=$?; stty -a | grep -o '[-]*icanon'; sleep 600"


@pytest.fixture
def script(tmp_path):
    return rank_script(tmp_path / "script.py", STEPS)


def under_view(script):
    """A terminal in which chorosrun shows the script's job."""
    command = shlex.join([*CHOROSRUN, "--view", "-np", "2", sys.executable, str(script)])
    # As in some scripts and CI systems; the view asks the terminal.
    return Terminal(f"cd {script.parent}; {command}{AFTER}", env={"COLUMNS": "80", "LINES": "24"})


def wait_until_restored(terminal, seconds=60):
    end = time.monotonic() + seconds
    while (state := terminal.state("alternate_on", "mouse_any_flag", "cursor_flag")) != ["0", "0", "1"]:
        assert time.monotonic() < end, state
        time.sleep(0.1)


def view_of_chorosrun(script):
    """The process of the view of the job that runs ``script``."""
    for process in psutil.process_iter(["cmdline"]):
        if "--of-chorosrun" in (process.info["cmdline"] or ()) and str(script) in process.parent().cmdline():
            return process
    raise AssertionError("there is no view")


def test_the_view_of_chorosrun(script):
    with under_view(script) as terminal:
        terminal.wait_for("rank host", "input-bound on rank 1", "▓▓▓▓▓▓▓▓", "] tick")
        assert terminal.state("alternate_on") == ["1"]
        terminal.resize(60, 15)
        lines = terminal.wait_for("█ computing ▓ loading · waiting\n", without="goodput").splitlines()
        assert lines[0].startswith("2 ranks, 0:")
        assert " steps/s, " in lines[1]
        assert lines[2].startswith("input-bound on rank 1")
        assert [line.split()[0] for line in lines[4:7]] == ["rank", "0", "1"]
        assert all(len(line) <= 60 for line in lines)
        terminal.press("q")
        wait_until_restored(terminal)
        terminal.resize(120, 40)  # for all that is said at the end
        terminal.wait_for("] tick\n")
        (script.parent / "end").touch()
        terminal.wait_for("ended well", "code=0\nicanon")


def test_control_c_ends_the_job_of_the_view(script):
    with under_view(script) as terminal:
        terminal.wait_for("rank host", "] tick")
        terminal.press("C-c")
        terminal.wait_for("sent SIGINT to the ranks", "code=130\nicanon")
        wait_until_restored(terminal)


def test_a_view_that_is_killed_does_not_end_the_job(script):
    with under_view(script) as terminal:
        terminal.wait_for("rank host", "] tick")
        view_of_chorosrun(script).kill()
        wait_until_restored(terminal)
        terminal.wait_for("] tick\n")
        (script.parent / "end").touch()
        terminal.wait_for("ended well", "code=0\nicanon")


def test_a_job_that_ends_closes_its_view(script):
    with under_view(script) as terminal:
        terminal.wait_for("rank host", "input-bound on rank 1")
        (script.parent / "end").touch()
        terminal.wait_for("ended well", "chorosrun: input-bound on rank 1", "code=0\nicanon")
        wait_until_restored(terminal)


def test_top_leaves_the_job_alone(script):
    with Running("-np", 2, sys.executable, script, cwd=script.parent) as job:
        job.wait_for(2, "ready")
        top = shlex.join([*TOP, str(job.process.pid)])
        for key in ("q", "C-c"):
            with Terminal(top + AFTER) as terminal:
                terminal.wait_for("rank host", "input-bound on rank 1", "▓▓▓▓▓▓▓▓", "] tick")
                terminal.press(key)
                terminal.wait_for("code=0\nicanon")
                wait_until_restored(terminal)
        with Terminal(top) as terminal:
            terminal.wait_for("rank host")
        with Terminal(top) as terminal:
            terminal.wait_for("rank host")
            os.kill(int(terminal.state("pane_pid")[0]), signal.SIGKILL)
        table = subprocess.run([*TOP, str(job.process.pid)], capture_output=True, text=True, check=True).stdout
        assert "input-bound on rank 1" in table
        assert [line.split()[0] for line in table.splitlines()[2:5]] == ["rank", "0", "1"]
        record = subprocess.run([*TOP, "--json"], capture_output=True, text=True)
        if record.returncode:  # other tests' jobs run
            assert "jobs of yours run on this host: give one of" in record.stderr
        record = subprocess.run([*TOP, str(job.process.pid), "--json"], capture_output=True, text=True, check=True)
        assert json.loads(record.stdout)["size"] == 2
        (script.parent / "end").touch()
        ended = job.end()
        assert (ended.code, ended.out.count("ended well")) == (0, 2)
    job.assert_nothing_left()


def test_top_ends_when_its_terminal_is_gone(script):
    with Running("-np", 2, sys.executable, script, cwd=script.parent) as job:
        job.wait_for(2, "ready")
        terminal, of_top = pty.openpty()
        termios.tcsetwinsize(terminal, (40, 120))
        # In a session of its own it gets no signal; where it does, another one may come before it has ended.
        arguments = {"start_new_session": True, "env": {**os.environ, "TERM": "xterm-256color"}}
        top = subprocess.Popen([*TOP, str(job.process.pid)], stdin=of_top, stdout=of_top, stderr=of_top, **arguments)
        os.close(of_top)
        shown = b""
        while b"rank host" not in shown:
            shown += os.read(terminal, 1 << 16)
        os.close(terminal)
        assert top.wait(60) == 0
        (script.parent / "end").touch()
        assert job.end().code == 0


def test_through_a_pipe_the_output_is_lines(script):
    (script.parent / "end").touch()
    with Running("--view", "-np", 2, sys.executable, script, cwd=script.parent) as job:
        ended = job.end()
    assert (ended.code, ended.err) == (0, "")
    assert sorted(line for line in ended.out.splitlines() if "ready" not in line) == [
        "[0] ended well",
        "[1] ended well",
    ]


def test_no_such_job():
    ended = subprocess.run([*TOP, str(os.getpid())], capture_output=True, text=True)
    assert ended.returncode == 70
    assert f"choros top {os.getpid()}: {os.getpid()} is not the PID of a chorosrun of yours" in ended.stderr


def test_without_textual_the_view_says_how_to_have_it(script, tmp_path):
    (tmp_path / "end").touch()
    hidden = tmp_path / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    hidden.write_text("import sys; sys.modules['textual'] = None\n")
    command = shlex.join([*CHOROSRUN, "--view", "-np", "1", sys.executable, str(script)])
    with Terminal(f"cd {tmp_path}; {command}{AFTER}", env={"PYTHONPATH": str(hidden.parent)}) as terminal:
        terminal.wait_for("pip install 'choros[view]'", "ended well", "code=0")
