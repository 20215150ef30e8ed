"""Whether this machine stood still: then a test that has failed is made once more, and the summary says so.

A kernel has left processes that could run without a core for three minutes ("workqueue lockup" in its log), in which
every test that ran reached its limit. A process on each core notes when it wakes up, ten times a second; on a machine
that is only busy it is late by less than half a second.
"""

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["stood_still", "watch"]

#: The environment variable with the file in which the processes note when they have woken up.
FILE = "CHOROS_TEST_BEATS"
SECONDS, BETWEEN = 1.0, 0.1
#: Of each core: when its process last woke up, and last did so too late.
BEAT = struct.Struct("<dd")


def watch(directory: Path) -> None:
    """Starts the processes, which end with this one."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    path = directory / "beats"
    path.write_bytes(BEAT.pack(time.monotonic(), 0.0) * len(cores))
    os.environ[FILE] = str(path)
    for number, core in enumerate(cores):
        command = [sys.executable, "-I", "-S", __file__, str(path), str(number), str(core), str(os.getpid())]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def stood_still(since: float) -> bool:
    """Whether a core's process could not run at some time ``since`` then, or cannot now."""
    if FILE not in os.environ:
        return False
    with contextlib.suppress(FileNotFoundError):
        beats = list(BEAT.iter_unpack(Path(os.environ[FILE]).read_bytes()))
        return any(late > since or time.monotonic() - last > SECONDS for last, late in beats)
    return False


def beat(path: str, number: str, core: str, parent: str) -> None:
    """Notes in the file when this process wakes up, while its parent runs."""
    os.sched_setaffinity(0, {int(core)})
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as beats:
        last, late = time.monotonic(), 0.0
        while os.getppid() == int(parent):
            time.sleep(BETWEEN)
            before, last = last, time.monotonic()
            late = last if last - before > SECONDS else late
            BEAT.pack_into(beats, int(number) * BEAT.size, last, late)


if __name__ == "__main__":
    beat(*sys.argv[1:])
