"""The job that the doctor tries, two ranks on this machine or one on each host, and the program of a rank."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten

from choros import durations
from choros.doctor.checks import OK, PROBLEM, Finding
from choros.launch.driver.machine import ask
from choros.launch.plan.arguments import FLAGS, Arguments
from choros.launch.plan.hosts import Host
from choros.settings import VARIABLES

_RANK = (sys.executable, "-P", "-m", "choros.doctor.job")
#: Settings that make a job leave files, or fail as it is asked to.
_LEFT_OUT = ("timeline", "autotune_log", "commit_dir", "chaos")
_SSH = ("ssh_port", "ssh_identity_file", "ssh_command")


def try_job(arguments: Arguments, hosts: Sequence[Host]) -> Finding:
    """Runs an allreduce on two ranks of this machine, or on one of each of the ``hosts``, and says how it ended."""
    flags, ranks = _flags(arguments, hosts), max(2, len(hosts))
    names = ", ".join(host.name for host in hosts) or "this machine"
    where = f"One rank on each of {names}" if len(hosts) > 1 else f"Two ranks on {names}"
    limits = ("--timeout", f"{durations.DOCTOR_JOB:g}", "--start-timeout", f"{durations.DOCTOR_JOB:g}")
    argv = [sys.executable, "-P", "-m", "choros.launch.cli", "-np", str(ranks), *flags, *limits, *_RANK]
    rows = [VARIABLES[name] for name in _LEFT_OUT]
    left_out = {name for row in rows for name in (row.name, *row.aliases)}
    began = time.monotonic()
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    try:
        done = ask(argv, 2 * durations.DOCTOR_JOB, environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return Finding("allreduce", OK, f"{where} have averaged 1 MiB, in {time.monotonic() - began:.1f} s in all.")
        _, _, said = done.stderr.rpartition("chorosrun: ")
        reason = shorten(said, 400, placeholder=" …")
    again = ["chorosrun", "--verbose", "-np", str(ranks), *flags, "python", *_RANK[1:]]
    return Finding("allreduce", PROBLEM, f"{where} could not average 1 MiB: {reason}", f"see all: {' '.join(again)}")


def _flags(arguments: Arguments, hosts: Sequence[Host]) -> list[str]:
    """Returns the flags of chorosrun that say where the job runs, and by which mpirun."""
    slots = 1 if len(hosts) > 1 else 2
    flags = ["-H", ",".join(str(replace(host, slots=slots)) for host in hosts)] if hosts else []
    for name in (*_SSH, "mpirun"):
        value = getattr(arguments, name)
        flags += [] if value is None else [FLAGS[name].spelled(), str(value)]
    return flags


def main() -> None:
    """Runs a rank: it fails if the average of 1 MiB of the ranks' numbers is not what it must be."""
    import numpy as np

    import choros
    from choros.parallel.ops import allreduce

    choros.init()
    average = allreduce(np.full(1 << 18, choros.rank(), np.float32))
    expected = (choros.size() - 1) / 2
    if not (average == expected).all():
        raise SystemExit(f"the average of the ranks' numbers is {average[0]}, and must be {expected}")


if __name__ == "__main__":
    main()
