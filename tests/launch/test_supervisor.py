"""chorosrun's supervisor with one wrapper, which it starts directly instead of mpirun."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import choros
from choros.launch import wrapper
from choros.launch.driver.job_end import Reason
from choros.launch.driver.job_record import JobRecord
from choros.launch.driver.outcome import outcome_of
from choros.launch.driver.output import LineMerger, Output
from choros.launch.driver.supervisor import Supervisor
from choros.launch.plan.command import Command
from choros.launch.plan.hosts import Host
from choros.launch.plan.job import Elastic, Job, Limits
from choros.launch.plan.mpi_implementations import OPEN_MPI_5
from choros.launch.processes.directories import SESSION
from choros.launch.processes.pipes import frame_pipes
from choros.launch.protocol.wrapper_options import JOB, WrapperOptions
from choros.transport.loop import caught_signals

pytestmark = pytest.mark.slow

WRAPPER = (sys.executable, "-I", "-S", str(Path(wrapper.__file__).with_name("__main__.py")))
ENVIRON = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
}
UNBOUND = WrapperOptions(bind=False)
HEAD = f"import os, signal, sys, time\ndef to_chorosrun(number): os.kill({os.getpid()}, number)\n"


def job(
    code,
    *,
    options=None,
    limits=None,
    environ=ENVIRON,
    wrapper=WRAPPER,
    err=None,
    merger=None,
    program=sys.executable,
    elastic=None,
    **how,
):
    """The end of a job whose rank runs ``code``, and its output."""
    argv = (*wrapper, str(options or UNBOUND), program, "-c", HEAD + code)
    out, err = io.BytesIO(), err or io.BytesIO()
    output = Output(out.write, err.write, prefix=False, colour=False, merger=merger)
    record = JobRecord(argv, 1, {})
    command = Command(argv, {**os.environ, **environ})
    with caught_signals() as signals:
        started = Supervisor(
            Job(argv, 1, elastic=elastic),
            command,
            output,
            record,
            limits or Limits(),
            signals,
            OPEN_MPI_5.signal_map,
            **how,
        )
        job_end = started.run()
    return job_end, out.getvalue(), err.getvalue()


def end_of(job_end):
    end = job_end.exits[0]
    return end.code, end.stopped


def test_a_rank_ends():
    job_end, out, err = job("print('a'); print('b'); sys.exit(3)")
    assert (end_of(job_end), job_end.reason, out, err) == ((3, False), None, b"a\nb\n", b"")


def test_frames_pass_mpirun_by(tmp_path):
    """The wrapper's standard output is closed; all that the rank writes at its end is read."""
    session = tmp_path / f"{SESSION}name"
    session.mkdir()
    environ = {**ENVIRON, JOB: "name", "TMPDIR": str(tmp_path)}
    before = "import os, sys; os.dup2(os.open(os.devnull, os.O_WRONLY), 1); os.execv(sys.argv[1], sys.argv[1:])"
    with frame_pipes(session, 1) as pipes:
        job_end, out, _ = job(
            "os.write(1, b'a' * 3_000_000)",
            environ=environ,
            frame_pipes=pipes,
            wrapper=(sys.executable, "-c", before, *WRAPPER),
        )
    assert (end_of(job_end), job_end.reason) == ((0, False), None)
    assert out == b"a" * 3_000_000 + b"\n"


#: An mpirun that ends only once the file is there.
LATE_MPIRUN = """
import os, signal, subprocess, sys, time
wrapper = subprocess.Popen(sys.argv[2:])
signal.signal(signal.SIGURG, lambda number, frame: wrapper.send_signal(number))
wrapper.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_lines_are_not_held_until_mpirun_ends(tmp_path):
    class Err(io.BytesIO):
        def write(self, data):
            (tmp_path / "shown").touch()
            return super().write(data)

    mpirun = (sys.executable, "-c", LATE_MPIRUN, str(tmp_path / "shown"), *WRAPPER)
    job_end, _, err = job("print('the last', file=sys.stderr)", wrapper=mpirun, err=Err(), merger=LineMerger(size=2))
    assert (end_of(job_end), job_end.mpirun_code, err) == ((0, False), 0, b"the last\n")


def test_a_rank_that_cannot_be_started(tmp_path):
    (tmp_path / "text").touch()
    missing, not_executable = (job("", program=str(tmp_path / name))[0].exits[0] for name in ("missing", "text"))
    assert (missing.code, missing.problem) == (127, f"command not found: '{tmp_path}/missing'.")
    assert (not_executable.code, not_executable.problem) == (126, f"'{tmp_path}/text' is not executable.")


#: An mpirun that loses the first message of a rank's end, as one that is about to end may.
FORGETFUL_MPIRUN = """
import signal, subprocess, sys
wrapper = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
signal.signal(signal.SIGURG, lambda number, frame: wrapper.send_signal(number))
forgotten = False
for line in wrapper.stdout:
    if b'"kind":"Exit"' in line and not forgotten:
        forgotten = True
    else:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
"""


def test_a_rank_reports_its_end_until_chorosrun_knows():
    mpirun = (sys.executable, "-c", FORGETFUL_MPIRUN, *WRAPPER)
    assert end_of(job("sys.exit(3)", wrapper=mpirun)[0]) == (3, False)


def test_a_rank_raises():
    job_end, _, err = job("raise ValueError('no')")
    assert end_of(job_end) == (1, False)
    assert job_end.exits[0].traceback.endswith("ValueError: no")
    assert err == b""


@pytest.mark.parametrize(
    ("code", "limits", "end", "reason"),
    [
        ("to_chorosrun(signal.SIGTERM)", Limits(), 143, Reason.TERMINATE),
        ("to_chorosrun(signal.SIGINT)", Limits(), 130, Reason.INTERRUPT),
        (
            "signal.signal(signal.SIGINT, signal.SIG_IGN); to_chorosrun(signal.SIGINT)",
            Limits(grace=0.3),
            137,
            Reason.INTERRUPT,
        ),
        (
            "signal.signal(signal.SIGINT, lambda *_: to_chorosrun(signal.SIGINT)); to_chorosrun(signal.SIGINT)",
            Limits(grace=60),
            137,
            Reason.INTERRUPT,
        ),
        ("", Limits(run=5.0), 143, Reason.TIMEOUT),
    ],
    ids=["SIGTERM", "SIGINT", "SIGINT that is ignored", "SIGINT twice", "timeout"],
)
def test_a_job_is_stopped(code, limits, end, reason):
    job_end, _, _ = job(f"{code}\nfor _ in range(600): time.sleep(0.1)", limits=limits)
    assert (end_of(job_end), job_end.reason) == ((end, True), reason)


#: The rank is killed while its wrapper is stopped, which then gets chorosrun's signal and that of this end at once.
KILLED_BEFORE_THE_SIGNAL = """
wrapper, rank = os.getppid(), os.getpid()
os.kill(wrapper, signal.SIGSTOP)
if os.fork() == 0:
    os.setsid()
    while open(f"/proc/{rank}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    os.kill(wrapper, signal.SIGABRT)
    os.kill(wrapper, signal.SIGCONT)
    os._exit(0)
os.kill(rank, signal.SIGKILL)
"""


def test_a_rank_that_ends_before_the_signal_is_not_stopped_by_it():
    assert end_of(job(KILLED_BEFORE_THE_SIGNAL)[0]) == (137, False)


def test_a_signal_is_forwarded():
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); to_chorosrun(signal.SIGUSR1); time.sleep(60)"
    assert end_of(job(code)[0]) == (7, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_an_elastic_job_that_is_being_stopped_kills_it_and_is_noted(number):
    handler = f"signal.signal(signal.SIGINT, lambda *_: to_chorosrun({number}))"
    code = f"{handler}; to_chorosrun(signal.SIGINT)\ntime.sleep(60)"
    job_end, _, _ = job(code, limits=Limits(grace=60), elastic=Elastic(1, 1))
    assert (end_of(job_end), job_end.reason) == ((137, True), Reason.INTERRUPT)
    assert (job_end.asked, job_end.preempted) == (number, False)


def test_a_signal_before_all_ranks_have_started_preempts_an_elastic_job():
    """The wrapper is started by what sends chorosrun the signal."""
    early = f"import os, signal, sys; os.kill({os.getpid()}, signal.SIGUSR1); os.execv(sys.argv[1], sys.argv[1:])"
    job_end, _, err = job("time.sleep(60)", wrapper=(sys.executable, "-c", early, *WRAPPER), elastic=Elastic(1, 1))
    assert (job_end.preempted, b"sent SIGUSR1 to the ranks" in err) == (True, True)


class Hosts:
    """Hosts that have changed whenever somebody writes a byte to ``path``."""

    def __init__(self, path, *wanted):
        os.mkfifo(path)
        self._descriptor, self._wanted = os.open(path, os.O_RDWR | os.O_NONBLOCK), list(wanted)

    def fileno(self):
        return self._descriptor

    def wanted(self):
        os.read(self._descriptor, 1)
        return self._wanted.pop(0) if self._wanted else None


def test_ranks_that_were_asked_to_end_for_other_hosts_are_known_if_these_are_gone(tmp_path):
    hosts = Hosts(tmp_path / "hosts", (Host("a", 1),))
    code = f"""
def change():
    with open({str(tmp_path / "hosts")!r}, "wb") as hosts:
        hosts.write(b".")
signal.signal(signal.SIGWINCH, lambda *_: (change(), time.sleep(1), sys.exit(75)))
change()
time.sleep(60)
"""
    job_end, _, _ = job(code, elastic=Elastic(1, 1), hosts=hosts)
    assert (end_of(job_end), job_end.moves, job_end.move) == ((75, False), True, None)


#: An mpirun that is a program, which sends frames.
SENDING_MPIRUN = f"""
import os, signal, subprocess, sys
sys.path.append({str(Path(choros.__file__).parent.parent)!r})
from choros.launch.protocol.frames import EVENTS, Exit, Start, Written, encode
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def send(*frames):
    sys.stdout.buffer.write(b"".join(map(encode, frames)))
    sys.stdout.buffer.flush()
host = os.uname().nodename
"""
#: The only rank has committed and ended when a new one is started; mpirun ends when that one does.
LATE_START = """
send(Start(0, host, os.getpid()), Exit(0, host, 75))
new = subprocess.Popen(["sleep", "60"], process_group=0)
send(Start(1, host, new.pid, added=True))
send(Exit(1, host, 128 - new.wait(), signal=-new.returncode))
"""
#: A new rank that rank 0 has taken in has not said so itself when rank 0 is killed; it ends later, with 3.
TAKEN_IN = """
from choros.observe.events import Event, Kind
new = subprocess.Popen(["sh", "-c", "sleep 0.5; exit 3"], process_group=0)
send(Start(0, host, os.getpid()), Start(1, host, new.pid, added=True))
send(Written(0, EVENTS, Event(Kind.RANK_JOINED, details={"number": 1}).to_json().encode()))
send(Exit(0, host, 137, signal=9))
send(Exit(1, host, new.wait()))
"""
#: Rank 1 is lost, and with it the job, when rank 0 asks for it by SIGUSR2; it is asked to end, and saves.
LOSES_A_RANK = """
send(Start(1, host, os.getpid()))
signal.signal(signal.SIGUSR2, lambda *_: send(Exit(1, host, 137, signal=9)))
rank_0 = subprocess.Popen(sys.argv[1:])
for number in (signal.SIGABRT, signal.SIGURG):
    signal.signal(number, lambda number, _: rank_0.send_signal(number))
rank_0.wait()
"""
SAVES = """
def save(*_):
    to_chorosrun(signal.SIGTERM)
    time.sleep(1)
    sys.exit(69)
signal.signal(signal.SIGTERM, save)
to_chorosrun(signal.SIGUSR2)
time.sleep(60)
"""
#: A rank whose number has become that of another process ends without a report.
REUSED = "send(Start(0, host, int(sys.argv[1])))"


def test_a_new_rank_that_starts_when_all_have_ended_is_ended():
    job_end, _, err = job("", wrapper=(sys.executable, "-c", SENDING_MPIRUN + LATE_START), elastic=Elastic(1, 2))
    assert [(rank, end.code) for rank, end in job_end.exits.items()] == [(0, 75), (1, 0)], err
    assert outcome_of(job_end, Limits()).exit_code == 75


def test_a_new_rank_that_was_taken_in_is_not_ended_with_the_last_of_the_others():
    job_end, _, err = job("", wrapper=(sys.executable, "-c", SENDING_MPIRUN + TAKEN_IN), elastic=Elastic(1, 2))
    assert [(rank, end.code) for rank, end in job_end.exits.items()] == [(0, 137), (1, 3)], err
    assert job_end.reason is Reason.TOO_FEW


def test_the_first_signal_to_a_job_of_too_few_ranks_lets_them_save():
    mpirun = (sys.executable, "-c", SENDING_MPIRUN + LOSES_A_RANK, *WRAPPER)
    job_end, _, err = job(SAVES, wrapper=mpirun, elastic=Elastic(2, 2))
    assert (job_end.reason, end_of(job_end)) == (Reason.TOO_FEW, (69, True)), err


def test_a_process_that_has_got_the_number_of_a_rank_is_not_killed():
    with subprocess.Popen(["sleep", "60"], process_group=0) as other:
        try:
            job_end, _, _ = job("", wrapper=(sys.executable, "-c", SENDING_MPIRUN + REUSED, str(other.pid)))
            assert job_end.missing == {0}
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.5)
        finally:
            other.kill()


#: An mpirun that loses pieces of its standard input, the first one, too, and repeats parts of others.
LOSSY_MPIRUN = """
import os, signal, subprocess, sys
wrapper = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
signal.signal(signal.SIGURG, lambda number, frame: (wrapper.send_signal(number), sys.exit(wrapper.wait())))
pieces = 0
while piece := os.read(0, 4096):
    if pieces not in (0, 30):
        os.write(wrapper.stdin.fileno(), piece[:1000] * (pieces % 7 == 0) + piece)
    pieces += 1
"""


@pytest.mark.parametrize("mpirun", [(), (sys.executable, "-c", LOSSY_MPIRUN)], ids=["all arrives", "pieces are lost"])
def test_a_call_is_received_and_its_result_sent(mpirun):
    code = (
        "time.sleep(0.5)\n"  # the pipe fills
        "data = sys.stdin.buffer.read()\n"
        "result = memoryview(2 * data)\n"
        "while result: result = result[os.write(int(os.environ['CHOROS_RESULT_FD']), result):]\n"
    )
    payload = random.Random(0).randbytes(200_000)
    options = replace(UNBOUND, call=True)
    job_end, _, _ = job(code, options=options, payload=payload, wrapper=(*mpirun, *WRAPPER))
    assert end_of(job_end) == (0, False)
    assert job_end.results[0] == 2 * payload


def test_child_processes_of_a_rank_are_ended():
    began = time.monotonic()
    job_end, _, _ = job("import subprocess; subprocess.Popen(['sleep', '60'])")
    assert end_of(job_end) == (0, False)
    assert time.monotonic() - began < 20


def test_a_partial_line_is_shown_while_the_rank_runs():
    code = "print('Name? ', end='', flush=True); time.sleep(1); to_chorosrun(signal.SIGUSR1); time.sleep(60)"
    job_end, out, _ = job(f"signal.signal(signal.SIGUSR1, lambda *_: os._exit(0)); {code}")
    assert (end_of(job_end), out) == ((0, False), b"Name? \n")


def test_large_output_is_complete():
    code = "for i in range(50_000): print(i, 'x' * (i % 100)); print(i, file=sys.stderr)"
    _, out, err = job(code)
    assert out.decode().splitlines() == [f"{i} {'x' * (i % 100)}" for i in range(50_000)]
    assert err.decode().splitlines() == [str(i) for i in range(50_000)]
