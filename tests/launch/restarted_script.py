"""Makes ten steps, with a commit after each; before its fifth, a job that was not started again waits for its end.

Prints the steps that the commits have, with the number of ranks of each, when it has finished.
"""

import os

import numpy as np

import choros
from choros.comm import global_process_set
from choros.elastic.retry import run
from choros.elastic.state import ObjectState

choros.init()


@run
def train(state):
    restarts = int(os.environ.get("CHOROS_RESTARTS", "0"))
    while len(state.steps) < 10:
        communicator = global_process_set.communicator
        if len(state.steps) == 4 and not restarts:
            print("ready", f"job={os.environ['CHOROS_JOB']}", f"pid={os.getpid()}", flush=True)
            while True:
                communicator.allreduce(np.ones(10_000, np.float32))
                state.check_host_updates()
        communicator.barrier()
        state.steps = [*state.steps, communicator.size]
        state.commit()
    print(f"rank {global_process_set.rank()} restarts={restarts} steps={state.steps}", flush=True)


train(ObjectState(steps=[]))
