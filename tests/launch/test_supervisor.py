"""chorosrun's supervisor and one wrapper with nothing between them: the wrapper stands in mpirun's place."""

import io
import os
import sys
import time
from pathlib import Path

import pytest

from choros.launch import wrapper
from choros.launch.driver.output import Output, Screen
from choros.launch.driver.stopping import Reason
from choros.launch.driver.supervisor import supervise
from choros.launch.plan.command import Command
from choros.launch.plan.limits import Limits
from choros.launch.plan.mpi_implementations import OpenMpi5

WRAPPER = (sys.executable, "-I", "-S", str(Path(wrapper.__file__).with_name("__main__.py")))
PLACE = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
}
HEAD = f"import os, signal, sys, time\ndef to_chorosrun(number): os.kill({os.getpid()}, number)\n"


def job(code, *options, limits=None, **how):
    """What became of a rank that runs ``code``, and what stands on the screen."""
    words = (*WRAPPER, "--no-bind", *options, "--", sys.executable, "-c", HEAD + code)
    out, err = io.BytesIO(), io.BytesIO()
    screen = Screen(out, err, prefix=False, colour=False)
    command = Command(words, {**os.environ, **PLACE})
    outcome = supervise(command, 1, Output(screen), carriers=OpenMpi5.carriers, limits=limits or Limits(), **how)
    return outcome, out.getvalue(), err.getvalue()


def end_of(outcome):
    end = outcome.exits[0]
    return end.code, end.stopped


def test_a_rank_ends():
    outcome, out, err = job("print('a'); print('b'); sys.exit(3)")
    assert (end_of(outcome), outcome.reason, out, err) == ((3, False), None, b"a\nb\n", b"")


def test_a_rank_raises():
    outcome, _, err = job("raise ValueError('no')")
    assert end_of(outcome) == (1, False)
    assert outcome.exits[0].traceback.endswith("ValueError: no")
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
        ("", Limits(run=1.0), 143, Reason.TIMEOUT),
    ],
    ids=["SIGTERM", "SIGINT", "SIGINT that is ignored", "SIGINT twice", "timeout"],
)
def test_a_job_is_stopped(code, limits, end, reason):
    outcome, _, _ = job(f"{code}\nfor _ in range(600): time.sleep(0.1)", limits=limits)
    assert (end_of(outcome), outcome.reason) == ((end, True), reason)


def test_a_signal_is_passed_on():
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); to_chorosrun(signal.SIGUSR1); time.sleep(60)"
    assert end_of(job(code)[0]) == (7, False)


def test_a_call_goes_in_and_its_result_comes_out():
    code = (
        "left = 1_000_000\n"
        "while left: left -= len(os.read(0, left))\n"
        "result = memoryview(b'x' * 500_000)\n"
        "while result: result = result[os.write(int(os.environ['CHOROS_RESULT_FD']), result):]\n"
    )
    outcome, _, _ = job(code, "--stdin", "--result", payload=b"p" * 1_000_000)
    assert end_of(outcome) == (0, False)
    assert outcome.results[0] == b"x" * 500_000


def test_what_a_rank_left_behind_is_ended():
    began = time.monotonic()
    outcome, _, _ = job("import subprocess; subprocess.Popen(['sleep', '60'])")
    assert end_of(outcome) == (0, False)
    assert time.monotonic() - began < 20


def test_a_piece_of_a_line_is_shown_while_the_rank_lives():
    code = "print('Name? ', end='', flush=True); time.sleep(1); to_chorosrun(signal.SIGUSR1); time.sleep(60)"
    outcome, out, _ = job(f"signal.signal(signal.SIGUSR1, lambda *_: os._exit(0)); {code}")
    assert (end_of(outcome), out) == ((0, False), b"Name? \n")


def test_much_output_arrives_whole():
    code = "for i in range(50_000): print(i, 'x' * (i % 100)); print(i, file=sys.stderr)"
    _, out, err = job(code)
    assert out.decode().splitlines() == [f"{i} {'x' * (i % 100)}" for i in range(50_000)]
    assert err.decode().splitlines() == [str(i) for i in range(50_000)]
