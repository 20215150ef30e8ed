"""chorosrun's supervisor with one wrapper, which it starts directly instead of mpirun."""

import io
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from choros.launch import wrapper
from choros.launch.driver.job_end import Reason
from choros.launch.driver.job_record import JobRecord
from choros.launch.driver.line_merger import LineMerger
from choros.launch.driver.output import Output
from choros.launch.driver.supervisor import Supervisor
from choros.launch.plan.command import Command
from choros.launch.plan.job import Job, Limits
from choros.launch.plan.mpi_implementations import OPEN_MPI_5
from choros.launch.processes.directories import SESSION
from choros.launch.processes.pipes import frame_pipes
from choros.launch.protocol.wrapper_options import JOB, WrapperOptions
from choros.transport.signal_pipe import caught_signals

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
            Job(argv, 1), command, output, record, limits or Limits(), signals, OPEN_MPI_5.signal_map, **how
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


def test_a_signal_is_forwarded():
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); to_chorosrun(signal.SIGUSR1); time.sleep(60)"
    assert end_of(job(code)[0]) == (7, False)


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
    options = replace(UNBOUND, stdin=True, result=True)
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
