"""A unit of two collectives: rank 2 receives what it cannot decode ARGUMENT 2 times; rank 1 is killed, or not."""

import os
import signal
import sys

import choros
from choros.comm import Reduction, global_process_set
from choros.comm.request import Request

choros.init()
communicator = global_process_set.communicator
number, attempts = communicator.rank, []


def unit():
    attempts.append(communicator.size)
    first = communicator.allreduce([1.0], Reduction.SUM)
    if number == 1 and sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2 and len(attempts) <= int(sys.argv[2]):
        raise LookupError("what was received")
    return (first + communicator.allreduce([10.0], Reduction.SUM)).item()


total = communicator.atomic(unit)

asked = []


def refused():
    asked.append(number)
    communicator.agree(Request("check"), problem=ValueError("no") if number == 0 else None)


try:
    communicator.atomic(refused)
except (ValueError, choros.MismatchError) as error:
    print(f"rank {number}: {total}, {type(error).__name__} after {len(asked)}", flush=True)
