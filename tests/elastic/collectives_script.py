"""Collectives of all kinds while ranks are killed at any moment, which the argument, a seed, determines."""

import os
import random
import signal
import sys
import threading
import time

import numpy as np

import choros
from choros.comm import Reduction, global_process_set

SECONDS = 1.0
choros.init()
communicator = global_process_set.communicator
number = communicator.rank
moments = random.Random(sys.argv[1])
dying = {rank: moments.uniform(0, SECONDS) for rank in moments.sample(range(communicator.size), 2)}


def die():
    time.sleep(dying[number])
    os.kill(os.getpid(), signal.SIGKILL)


if number in dying:
    threading.Thread(target=die, daemon=True).start()
left, shared = communicator.size - len(dying), communicator.empty(300_000)
order, done, begun = random.Random(7), False, time.monotonic()
while not done:
    size, kind = order.choice([10, 5_000, 300_000]), order.randrange(5)
    if kind == 0:
        result = communicator.allreduce(np.full(size, number + 1.0, np.float32), Reduction.SUM)
        assert (result == sum(each + 1 for each in communicator.launched)).all()
    elif kind == 1:
        assert communicator.allgather(np.full((2, 3), number))[::2, 0].tolist() == list(communicator.launched)
    elif kind == 2:
        rows = communicator.reducescatter(np.ones((size // 10, 4), np.float32), Reduction.SUM)
        assert (rows == communicator.size).all()
    elif kind == 3:
        shared.fill(number + 1.0)
        communicator.allreduce(shared, Reduction.SUM, out=shared)
        assert (shared == sum(each + 1 for each in communicator.launched)).all()
    else:
        before = communicator.size
        works = [communicator.start(f"{each}", communicator.allreduce, [1.0], Reduction.SUM) for each in "ab"]
        sums = [work.wait()[0] for work in works]
        assert all(communicator.size <= each <= before for each in sums)  # a rank may be lost in between
    ends = communicator.size == left and time.monotonic() - begun > 1.5 * SECONDS
    done = bool(communicator.allreduce(np.array([ends]), Reduction.MAX)[0])
print(f"rank {number}: {communicator.size} left, {communicator.launched}", flush=True)
