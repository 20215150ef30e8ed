"""Stalls: who is missing, and what it does, with its stack; and ``choros stacks``."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from choros.launch.driver.wait_watch import StackRequests, rank_report, stall_report
from choros.launch.processes import control
from choros.launch.processes.directories import SESSION
from choros.launch.protocol.frames import Stacks, Start
from choros.observe.processes import stack_text, state_of, take_stacks
from choros.observe.waits import Stall
from choros.transport.loop import Loop
from harness import needs
from launch.launched import Running, rank_script, run

#: Ranks 1 to 4 never call the second allreduce, each for another reason.
STUCK = """
import choros, ctypes, numpy, threading
choros.init()
c = choros.comm.global_process_set.communicator
c.allreduce(numpy.ones(4), name="first")

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def loops():
    while True:
        pass

def in_c():
    ctypes.PyDLL(None).pause()  # with the interpreter's lock

def skips():
    threading.Event().wait()

if rank:
    (stopped, loops, in_c, skips)[rank - 1]()
c.allreduce(numpy.ones(4), name="loss")
"""
STACKS_COMMAND = (sys.executable, "-P", "-m", "choros", "stacks")


def line_of(script, text):
    """The line of the script that Python's stack names, and its text."""
    lines = script.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.strip().startswith(text))
    return f'File "{script}", line {number}, in '


def test_a_process_whose_name_the_kernel_cuts_within_a_character(tmp_path):
    script = tmp_path / ("т" * 8)  # of which it keeps 15 bytes
    script.write_text("#!/bin/sh\necho started\nread line\n")
    script.chmod(0o755)
    with subprocess.Popen([script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"  # Popen may return before the kernel gives the name
        assert Path(f"/proc/{process.pid}/comm").read_bytes() == ("т" * 8).encode()[:15] + b"\n"
        assert state_of(process.pid) in ("sleeps", "runs")
        process.communicate(b"\n")


def test_a_process_that_runs_no_python_any_more_has_no_stack(monkeypatch):
    monkeypatch.setattr("choros.observe.processes._ask", lambda *_: ("", ""))
    assert take_stacks(os.getpid()) == "(no stack: no thread of it runs Python any more)"


@pytest.mark.slow
def test_ranks_that_others_wait_for_are_reported_with_their_stacks(tmp_path):
    script = rank_script(tmp_path / "script.py", STUCK)
    flags = ("--stall-check-warning-time-seconds", 2, "--stall-shutdown", 60)
    with Running("-np", 5, *flags, sys.executable, script, env={"TMPDIR": str(tmp_path)}) as job:
        report = ""
        while "threading.Event().wait()" not in report:
            line = job.process.stderr.readline()
            assert line, report
            report += line
        asked = (*STACKS_COMMAND, str(job.process.pid))
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        shown = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=120, check=True).stdout
        job.signal(signal.SIGTERM)
        ended = job.end()
        job.assert_nothing_left()
    assert re.match(  # after a line that a start of more than 2 s shows
        r"(chorosrun: starting 5 ranks …\n)?"
        r"chorosrun: rank 0 has waited \d+ s for ranks 1, 2, 3, 4 in allreduce\(name='loss', op=Average, "
        rf"dtype=float64, shape=\(4,\)\) at {script}:\d+, since \d\d:\d\d:\d\d\. What they do:\n",
        report,
    ), report
    for text in (report, shown):
        ranks = re.split(r"^ *(?=rank \d on )", text, flags=re.MULTILINE)[-4:]
        stopped, loops, in_c, skips = ranks
        assert re.match(r"rank 1 on \S+, PID (\d+) is stopped by a signal: kill -CONT \1 continues it\n", stopped)
        assert line_of(script, "os.kill(os.getpid(), signal.SIGSTOP)") + "stopped" in stopped
        assert re.search(r"its last collective, \d+ s ago: allreduce\(name='first', op=Average, dtype=float64", stopped)
        assert re.match(r"rank 2 on \S+, PID \d+ runs\n", loops), loops
        assert "main thread, holds the interpreter's lock" in loops
        assert f'File "{script}", ' in loops
        assert "in loops" in loops
        assert re.match(r"rank 3 on \S+, PID \d+ sleeps\n", in_c)
        assert line_of(script, "ctypes.PyDLL(None).pause()") + "in_c" in in_c
        assert line_of(script, "threading.Event().wait()") + "skips" in skips
    assert re.search(r"^rank 0 on \S+, PID \d+ (sleeps|runs), waits itself in allreduce\(name='loss'", shown, re.M)
    assert report.count("has waited") == 1
    assert ended.code == 143


#: Rank 1 is stopped when all have called the second allreduce, before it sends anything.
MOVING = """
import choros, numpy
choros.init()
c = choros.comm.global_process_set.communicator
if rank == 1:
    c._allreduce = c._allreduce_anywhere = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
c.allreduce(numpy.ones(4), name="moving")
"""


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_data_move_is_reported(tmp_path):
    """The others wait in C, where they cannot report it."""
    script = rank_script(tmp_path / "script.py", MOVING)
    ended = run("-np", 2, "--stall-shutdown", 6, sys.executable, script)
    assert ended.code == 70
    assert re.match(
        r"chorosrun: ranks 0, 1 have been in allreduce\(name='moving', .* for \d+ s, and it does not end", ended.err
    )
    first, second = re.split(r"^  (?=rank \d on )", ended.err, flags=re.MULTILINE)[1:]
    assert re.match(r"rank 1 on \S+, PID \d+ is stopped by a signal", first)
    assert re.match(r"rank 0 on ", second)
    assert "_allreduce" in second


@pytest.mark.slow
def test_a_job_that_stalls_is_stopped_on_request_after_the_report(tmp_path):
    body = STUCK.replace("if rank:", "if rank == 1:")
    script = rank_script(tmp_path / "script.py", body)
    ended = run("-np", 2, "--stall-shutdown", 6, sys.executable, script)
    assert ended.code == 70
    report, _, outcome = ended.err.partition("longer than CHOROS_STALL_SHUTDOWN_SECONDS=6; the job was stopped.")
    assert "os.kill(os.getpid(), signal.SIGSTOP)" in report
    assert not outcome.strip()


@needs("torch")
@pytest.mark.slow
def test_a_parameter_server_that_is_stopped_is_reported(tmp_path):
    flags = ("--ps", 1, "-np", 1, "--stall-check-warning-time-seconds", 1, "--stall-shutdown", 12)
    script = Path(__file__).with_name("stopped_server_script.py")
    ended = run(*flags, sys.executable, script, cwd=tmp_path, env={"KERAS_BACKEND": "torch"})
    assert ended.code == 70
    assert re.search(r"worker 0 has waited \d+ s for ps 0 in a request to parameter server 0", ended.err), ended.err
    assert re.search(r"ps 0 on \S+, PID \d+ is stopped by a signal", ended.err)
    assert re.search(r"the chief has waited \d+ s for worker 0 in a function on worker 0", ended.err)


@pytest.mark.slow
def test_a_rank_that_returned_early_is_named(tmp_path):
    body = STUCK.replace("if rank:", "if rank == 1: sys.exit(0)\nif False:")
    ended = run("-np", 2, sys.executable, rank_script(tmp_path / "script.py", body))
    assert ended.code == 1
    assert "  rank 1: shutdown() at the end of its script\n" in ended.err


def test_the_report_of_ranks_that_have_no_stack():
    stall = Stall("rank 0 has waited 60 s for ranks 1, 2, 3 in barrier()", (1, 2, 3), 0.0)
    start = Start(1, "a", 7)
    missing = [
        rank_report("rank 1", None, None),
        rank_report("rank 2", start, None, runs=False, doing="ended with exit code 0"),
        rank_report("rank 3", start, None),
    ]
    assert stall_report(stall, missing).splitlines()[1:] == [
        "  rank 1 has not started",
        "  rank 2 on a, PID 7, ended with exit code 0",
        "  rank 3 on a, PID 7",
        "    (no stack: its wrapper did not answer, or mpirun cannot ask it)",
    ]
    many = stall_report(stall, [missing[0]] * 10).splitlines()
    assert (len(many), many[-1]) == (10, "  and 2 more: `choros stacks` shows all")


def test_a_request_is_answered_once_by_all_its_ranks():
    asked, answered, loop = [], [], Loop()
    requests = StackRequests(loop, lambda: asked.append(1))
    requests.ask([0, 1], answered.append)
    requests.note(Stacks(0, "", "a"))
    requests.note(Stacks(5, "", "of no request"))
    assert (requests.pending, answered) == (True, [])
    requests.note(Stacks(1, "", "b"))
    requests.note(Stacks(1, "", "again"))
    assert (requests.pending, len(asked), [each[1].text for each in answered]) == (False, 1, ["b"])
    requests.ask([], answered.append)
    StackRequests(loop, None).ask([0], answered.append)
    assert (len(asked), answered[1:]) == (1, [{}, {}])


def test_threads_with_equal_stacks_are_shown_together():
    def thread(number, name, *functions):
        frames = [{"name": each, "filename": "no such file", "line": 1} for each in functions]
        return {"os_thread_id": number, "thread_name": name, "owns_gil": False, "frames": frames}

    threads = [thread(8, "a", "wait"), thread(9, "b", "wait"), thread(7, None, "inner", "outer")]
    threads += [thread(10, "choros: end of the script", "watch"), thread(11, "no Python")]
    assert stack_text(threads, 7).splitlines() == [
        "main thread",
        '  File "no such file", line 1, in outer',
        '  File "no such file", line 1, in inner',
        "thread a, thread b",
        '  File "no such file", line 1, in wait',
    ]


@pytest.mark.slow
def test_the_stacks_of_a_shells_python():
    """The rank is a shell: what it runs is shown, of which some is no Python."""
    code = "print(1, flush=True); import time; time.sleep(600)"
    shell = f"sleep 600 & '{sys.executable}' -c '{code}' & wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.stdout.readline()
            children = psutil.Process(process.pid).children()
            while any(child.status() != psutil.STATUS_SLEEPING for child in children):
                time.sleep(0.01)
            text = take_stacks(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert re.match(r"its child process \d+ sleeps\nmain thread\n  File \"<string>\", line 1, in <module>", text), text
    assert state_of(process.pid) == ""
    assert take_stacks(process.pid).startswith("(no stack: py-spy: ")


def test_who_connects_receives_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    session = tmp_path / f"{SESSION}{'long' * 40}"
    session.mkdir()
    with control.control_socket(session, control.STACKS_OF) as listener:
        jobs = control.running_jobs(control.STACKS_OF)
        assert list(jobs) == [os.getpid()]
        assert jobs[os.getpid()].stat().st_mode & 0o777 == 0o600
        listener.setblocking(True)
        server = threading.Thread(target=lambda: control.send_text(listener.accept()[0], "text" * 100_000))
        server.start()
        assert control.text_of(jobs[os.getpid()], 60) == "text" * 100_000
        server.join()
    assert control.running_jobs(control.STACKS_OF) == {}


def test_a_job_that_ends_while_jobs_are_looked_for_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("ends", "runs"):
        (tmp_path / f"{SESSION}{name}").mkdir()
    looks = os.scandir

    def ends(path):
        if str(path).endswith("ends"):
            os.rmdir(path)
        return looks(path)

    with control.control_socket(tmp_path / f"{SESSION}runs", control.VIEW_OF):
        monkeypatch.setattr(os, "scandir", ends)
        assert list(control.running_jobs(control.VIEW_OF)) == [os.getpid()]
    assert not (tmp_path / f"{SESSION}ends").exists()


def test_a_directory_without_sockets_is_no_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(socket.socket, "bind", refuse, raising=False)
    with control.control_socket(tmp_path, control.STACKS_OF) as listener:
        assert listener is None


def test_choros_stacks_names_the_jobs_that_run(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    for arguments, text in (
        ((), "choros: choros stacks: 0 jobs of yours run on this host: start it with chorosrun"),
        (("1",), "choros: choros stacks 1: 1 is not the PID of a chorosrun of yours on this host; start it"),
    ):
        done = subprocess.run(
            [*STACKS_COMMAND, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr[: len(text)]) == (70, text)
