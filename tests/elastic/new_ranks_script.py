"""Ranks that are killed, and replaced: arguments are their numbers, such as ``0 2``, and what new ranks do: ``join``,
``die`` (only the first one, or ``early``, before ``init()``), or ``late`` (they come when the others have left the
opening: they wait there); ``leave``: the ranks leave in order; ``full``: before the first one dies, it fills the
directory for temporary files; ``closed``: as ``join``, with standard input and error closed.

Prints each rank's number at the launcher, its rank, and the sum of ones over all ranks.
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import choros
from choros import comm
from choros.comm import Reduction

NOTICE = 128
*victims, what = sys.argv[1:]
new_rank = os.environ.get("CHOROS_NEW_RANK")
if new_rank and what == "early" and not Path("died").exists():
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
for descriptor in (0, 2) if what == "closed" else ():
    os.close(descriptor)
choros.init()
if what == "closed":  # a connection of MPI's, or another file of the job, in their place would receive what is printed
    assert [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (0, 2)] == ["/dev/null"] * 2
number = int(new_rank.split(",")[0]) if new_rank else choros.rank()
communicator = comm.global_process_set.communicator
assert communicator.is_new == bool(new_rank)
assert communicator.allgather([7]).tolist() == [7] * 3  # of a new rank, too
steps = 0
with comm.opening():
    if new_rank:
        if what == "die" and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while what == "late" and not Path("ended").exists():
            time.sleep(0.05)
        Path("came").touch()
        communicator.notice |= NOTICE
        is_member = comm.admit()
        communicator = comm.global_process_set.communicator
        steps = int(communicator.broadcast(0)) if is_member else 20
    while steps < (60 if what == "leave" else 20) or (choros.size() < 3 and what not in ("late", "leave", "full")):
        if str(number) in victims and what == "leave":
            communicator.notice |= comm.LEAVES
            if steps == 7:
                comm.leave_alone()
                sys.exit()
        elif str(number) in victims and steps == 5 and not new_rank:
            if what == "full":
                with open(Path(tempfile.gettempdir()) / "full", "wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(1 << 12))
            os.kill(os.getpid(), signal.SIGKILL)
        total = communicator.allreduce(1.0, Reduction.SUM)
        steps += 1
        time.sleep(0.01)
        if comm.admit():
            communicator.broadcast(steps)
    total = communicator.allreduce(1.0, Reduction.SUM)
assert what != "join" or communicator.noticed & NOTICE  # what a new rank was told while it waited
Path("ended").touch()
if what == "late" and not new_rank:
    while not Path("came").exists():
        time.sleep(0.05)
    time.sleep(1)  # in which it would print, too
print(f"number {number} is rank {choros.rank()} of {choros.size()}: {total:g}", flush=True)
