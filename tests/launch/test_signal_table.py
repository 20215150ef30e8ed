"""Each signal to each process of a job has the effect that the table of docs/elastic.md names, and nothing is left."""

import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.launched import Running
from launch.signal_table import EFFECTS, NOTHING, PAGE, SIGNALS, page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SCRIPT = Path(__file__).with_name("signalled_script.py")
PROCESSES = ("rank", "wrapper", "mpirun", "chorosrun")
#: Stalls are reported soon, end the job after longer than init() takes, and who does not end when asked is killed soon.
LIMITS = ("--stall-check-warning-time-seconds", 1, "--stall-shutdown", 6, "--grace-period", 3)
#: Of those that take longer, or do as another one, ``make test-all`` runs all.
OFTEN = {
    *(("elastic", process, "TERM") for process in PROCESSES),
    *(("plain", process, "TERM") for process in ("wrapper", "mpirun")),
    ("plain", "rank", "HUP"), ("elastic", "rank", "STOP"), ("elastic", "wrapper", "KILL"), ("plain", "wrapper", "INT"),
}  # fmt: skip


def cases():
    for process, name in EFFECTS:
        for kind in ("plain", "elastic"):
            marks = () if (kind, process, name) in OFTEN else pytest.mark.nightly
            yield pytest.param(kind, process, name, marks=marks, id=f"{kind}-{process}-{name}")


@pytest.mark.parametrize(("kind", "process", "name"), list(cases()))
def test_a_signal_to_a_process(tmp_path, kind, process, name):
    effect = EFFECTS[process, name][kind == "elastic"]
    number, end = signal.Signals[f"SIG{name}"], tmp_path / "end"
    flags = ("--min-np", 2) if kind == "elastic" else ()
    with Running("-np", 3, *flags, *LIMITS, sys.executable, SCRIPT, end) as job:
        job.wait_for(1, "processes")
        pids = {name: int(pid) for name, pid in re.findall(r"(\w+)=(\d+)", job.output)} | {"chorosrun": job.process.pid}
        target = psutil.Process(pids[process])
        target.send_signal(number)
        if effect.finish:
            if number != signal.SIGSTOP and effect is not NOTHING:
                target.wait(30)
            end.touch()
        if number == signal.SIGSTOP and process == "chorosrun":
            time.sleep(2)
            assert job.process.poll() is None
            job.signal(signal.SIGCONT)
        ended = job.end(90)
        job.assert_nothing_left()
    assert (ended.code, ended.out.count("finished of")) == (effect.code, effect.finish), ended
    assert effect.says in ended.err, ended.err


def test_all_signals_to_all_processes_are_in_the_table():
    assert list(EFFECTS) == [(process, name) for process in PROCESSES for name in SIGNALS]
    assert page() == PAGE.read_text(), "run tests/launch/signal_table.py"
