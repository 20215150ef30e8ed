"""Processes that commit again and again, each killed at a random moment: ``killed_committers.py DIRECTORY KILLS``.

Prints, for each, the last commit that was acknowledged, the one that was loaded, and whether it is as it was written.
"""

import itertools
import json
import os
import random
import signal
import sys
import time

import ml_dtypes
import numpy as np

from choros.elastic.commit_store import CommitStore

store, kills, rng = CommitStore(sys.argv[1]), int(sys.argv[2]), random.Random(13)


def state(number):
    weights = [np.full((50, 100), number, dtype) for dtype in (np.float32, ml_dtypes.bfloat16)]
    return {"weights": weights, "epoch": number, "blob": bytes([number % 256]) * 1000, "position": {"batch": number}}


def killed(first, seconds):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for number in itertools.count(first):
            store.write(state(number))
            os.write(writing, b".")
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as acknowledged:
        return len(acknowledged.read())


begin = time.perf_counter()
last = store.write(state(1))
one_write, results = time.perf_counter() - begin, []
for _ in range(kills):
    acknowledged = last + killed(last + 1, rng.uniform(0, 3 * one_write))
    commit = store.load_last()
    last = commit["epoch"]
    written = state(last)
    same = all(map(np.array_equal, commit.pop("weights"), written.pop("weights"))) and commit == written
    results.append((acknowledged, last, same))
store.write(state(last + 1))
print(json.dumps({"results": results, "left": sorted(os.listdir(store.directory))}))
