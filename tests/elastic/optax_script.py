"""Trains by ``hvd.elastic.run`` with optax, of whose state each rank has slices, and an ``ObjectState`` that has the
state of one process: row i of the data is trained on once; with a momentum of 1 the state is the sum of all gradients.

Arguments: where ranks are killed, such as ``1@5``. Prints a line of JSON on each rank. New ranks are not killed.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from faults import Faults

import choros.jax as hvd
from choros.comm import global_process_set

ROWS, BATCH = 600, 12
hvd.init()
number, faults = hvd.rank(), Faults(sys.argv[1], global_process_set.communicator)
tx = hvd.distributed(optax.sgd(1.0, momentum=1.0), op=hvd.Sum, shard_state=True)
params = {"w": jnp.zeros(ROWS - 1), "b": jnp.zeros(1)}


@jax.jit
def step(params, opt_state, rows):
    gradients = jnp.zeros(ROWS).at[rows].add(-1.0)
    updates, opt_state = tx.update({"w": gradients[:-1], "b": gradients[-1:]}, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@hvd.elastic.run
def train(state):
    opt_state = hvd.own_state(tx, state.whole, state.params)
    while state.step * BATCH < ROWS:
        faults.come("step")
        rows = np.arange(state.step * BATCH, (state.step + 1) * BATCH)[hvd.rank() :: hvd.size()]
        state.params, opt_state = step(state.params, opt_state, rows)
        state.step += 1
        if state.step % 2 == 0:
            state.whole = hvd.whole_state(tx, opt_state, state.params)
            state.commit()
    held = sum(leaf.size for leaf in jax.tree.leaves(opt_state.inner)) / ROWS
    return held, hvd.whole_state(tx, opt_state, state.params)


state = hvd.elastic.ObjectState(params=params, whole=optax.sgd(1.0, momentum=1.0).init(params), step=0)
held, whole = train(state)
counts = -np.concatenate([np.asarray(leaf) for leaf in jax.tree.leaves(whole)][::-1])  # w after b
report = {
    "number": number,
    "size": hvd.size(),
    "wrong": {str(row): float(counts[row]) for row in np.flatnonzero(counts != 1)},
    "held": held,
}
print(json.dumps(report), flush=True)
