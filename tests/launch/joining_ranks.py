"""Ranks of which the last one is killed, and replaced by a new one: they end when all of them are there again."""

import os
import signal

import choros.torch as hvd

hvd.init()
state = hvd.elastic.ObjectState(steps=0)


@hvd.elastic.run
def train(state):
    if state.steps == 0 and hvd.rank() == hvd.size() - 1 == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while state.steps == 0 or hvd.size() < 3:
        hvd.allgather_object(hvd.rank())
        state.steps += 1
        state.commit()


train(state)
print(f"finished with {hvd.size()}", flush=True)
