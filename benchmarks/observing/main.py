"""What it costs to look: steps of 5 ms on two ranks, while the live view runs and something reads the metrics, or not.

    python benchmarks/observing/main.py --windows 12 --json result.json

One job, which keeps its record for a report and serves metrics: in turn, ``choros top`` shows it in a terminal and its
metrics are read every five seconds, and nothing does. A step is a fixed amount of work on a core of its own, and there
is no further core: what else runs makes it longer, by the share of a core that it takes at most. Prints that share, the
mean step of both, and the median ratio of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil

STEPS = Path(__file__).with_name("steps.py")
PORT = 9464
#: Seconds of a window, those before it, in which a view starts or ends, and those in which the job starts.
WINDOW, BEFORE, START = 5.0, 3.0, 8.0


@contextmanager
def looked_at(job: int) -> Iterator[int]:
    """A live view of the job in a terminal of its own, the PID of which is yielded, and a reader of its metrics."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "choros", "top", str(job)]
    environ = {**os.environ, "TERM": "xterm-256color"}
    view = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True)
    os.close(theirs)
    end = threading.Event()
    threads = [threading.Thread(target=read_metrics, args=[end]), threading.Thread(target=drain, args=[terminal])]
    for thread in threads:
        thread.start()
    try:
        yield view.pid
        assert view.poll() is None, "the view has ended"
    finally:
        end.set()
        view.send_signal(signal.SIGTERM)
        view.wait()
        for thread in threads:
            thread.join()
        os.close(terminal)


def drain(terminal: int) -> None:
    """Reads what is written to a terminal, to its end."""
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def read_metrics(until: threading.Event) -> None:
    """Reads them as Prometheus would, often."""
    while True:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5).read()
        if until.wait(5.0):
            return


def window(*others: int) -> tuple[float, float]:
    """When a window began, and the seconds of a core that the processes ``others`` took in each second of it."""

    def spent() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in others]
        return sum(each.user + each.system for each in times)

    time.sleep(BEFORE)
    began, before = time.time(), spent()
    time.sleep(WINDOW)
    return began, (spent() - before) / WINDOW


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    work = subprocess.run([sys.executable, str(STEPS)], env=environ, capture_output=True, check=True, text=True).stdout
    with tempfile.TemporaryDirectory() as name:
        until = Path(name) / "end"
        chorosrun = str(Path(sys.executable).with_name("chorosrun"))
        flags = ["-np", "2", "--metrics-port", str(PORT), "--report", f"{name}/run.html"]
        command = [chorosrun, *flags, sys.executable, str(STEPS), "--until", str(until), "--work", work.strip()]
        with subprocess.Popen(command) as job:
            time.sleep(START)
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(arguments.windows):
                found[False].append(window(job.pid))
                with looked_at(job.pid) as view:
                    found[True].append(window(job.pid, view))
            until.touch()
        times = [float(line) for line in until.with_name("times.txt").read_text().splitlines()]
    steps = [(first, second - first) for first, second in pairwise(times)]
    means = {
        observed: [statistics.mean(took for at, took in steps if began <= at < began + WINDOW) for began, _ in each]
        for observed, each in found.items()
    }
    cores = {observed: statistics.mean(spent for _, spent in each) for observed, each in found.items()}
    ratios = [mine / other for mine, other in zip(means[True], means[False], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a step {statistics.mean(means[False]) * 1e3:.3f} ms, looked at {statistics.mean(means[True]) * 1e3:.3f} ms")
    print(f"the ratio of neighbours: median {middle:.4f}, quartiles {low:.4f} and {high:.4f}")
    print(f"of a core, chorosrun takes {cores[False]:.2%}; with the view {cores[True]:.2%}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"plain": means[False], "observed": means[True]}, indent=1))


if __name__ == "__main__":
    main()
