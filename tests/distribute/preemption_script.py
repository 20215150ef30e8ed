"""The script of each rank of ``test_preemption.py``: ``python preemption_script.py FRAMEWORK DIRECTORY [STEPS]``.

Trains STEPS more steps than are completed, forever by default, and prints how it ends.
"""

import importlib
import itertools
import os
import sys

import numpy as np

import choros
from choros import distribute
from choros.distribute.preemption import PreemptionCheckpointHandler

importlib.import_module(sys.argv[1])
strategy = distribute.MirroredStrategy()
TARGET = np.linspace(-1.0, 1.0, 8)


class Weights:
    """With momentum, so that every step matters; NumPy adds a suffix to the path of ``save``."""

    def __init__(self):
        self.values, self.momentum = np.zeros(8), np.zeros(8)

    def save(self, path):
        np.savez(path, values=self.values, momentum=self.momentum)

    def restore(self, path):
        with np.load(f"{path}.npz") as file:
            self.values, self.momentum = file["values"], file["momentum"]

    def step(self, number, gradient_of):
        self.momentum = 0.9 * self.momentum + gradient_of(
            self.values, np.random.default_rng(number).normal(size=(4, 8))
        )
        self.values = self.values - 0.1 * self.momentum


def gradient_of_all(values, noise):
    return np.mean(values - TARGET + noise, axis=0)


def reduced_gradient(values, noise):
    def of_rows(rows):
        return distribute.get_replica_context().all_reduce("MEAN", np.mean(values - TARGET + rows, axis=0))

    return strategy.run(of_rows, args=(noise[2 * choros.rank() : 2 * choros.rank() + 2],))


weights = Weights()
handler = PreemptionCheckpointHandler(strategy.cluster_resolver, weights, sys.argv[2])
begin = handler.total_run_calls
more = range(begin, begin + int(sys.argv[3])) if len(sys.argv) > 3 else itertools.count(begin)
try:
    with handler.watch_preemption_scope():
        for number in more:
            handler.run(weights.step, number, reduced_gradient)
            if number == begin + 5:
                print(f"ready pid={os.getpid()} rank={choros.rank()}", flush=True)
except SystemExit as error:
    print(f"exits with {error.code} after {handler.total_run_calls}", flush=True)
    raise

alone = Weights()
for number in range(handler.total_run_calls):
    alone.step(number, gradient_of_all)
np.testing.assert_allclose(weights.values, alone.values, rtol=1e-9)
print(f"resumed after {begin}")
