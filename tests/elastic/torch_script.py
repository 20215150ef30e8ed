"""A loop of PyTorch over an ElasticSampler: counts[i] is how often example i was trained on; see ``fit_script.py``.

Arguments: the faults, and ``run`` for ``hvd.elastic.run``, ``plain`` for the loop alone, ``replaced`` for ``run`` until
all ranks are there again.
"""

import json
import os
import re
import signal
import sys

import psutil
import torch

import choros.torch as hvd
from choros.comm import global_process_set

EXAMPLES, BATCH, EPOCHS = 103, 4, 2
hvd.init()
number, size = hvd.rank(), hvd.size()
is_new = global_process_set.communicator.is_new
faults = [re.fullmatch(r"(\d+)@(\d+)=?(\w*)(!?)", each).groups() for each in sys.argv[1].split(",") if each]
counts = torch.nn.Parameter(torch.zeros(EXAMPLES))
model = torch.nn.Module()
model.counts = counts
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([counts], lr=1.0), op=hvd.Sum, named_parameters=[("counts", counts)]
)
sampler = hvd.elastic.ElasticSampler(range(EXAMPLES), seed=3)
loader = torch.utils.data.DataLoader(range(EXAMPLES), batch_size=BATCH, sampler=sampler)
steps = 0


def train_epoch(state=None):
    global steps
    for index, rows in enumerate(loader):
        for rank, step, name, to_job in faults:
            if (int(rank), int(step)) == (number, steps) and not is_new:
                target = psutil.Process().parents()[2].pid if to_job else os.getpid()  # wrapper, mpirun, chorosrun
                os.kill(target, signal.Signals[name or "SIGKILL"])
        steps += 1
        optimizer.zero_grad()
        (-counts[rows].sum()).backward()
        optimizer.step()
        sampler.record_batch(index, BATCH)
        if state is not None and index % 3 == 2:
            state.commit()
    hvd.join()


def plain():
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        while sampler.has_left():
            train_epoch()


@hvd.elastic.run
def train(state):
    while True:
        sampler.set_epoch(state.epoch)  # again after each loss
        while sampler.has_left():
            train_epoch(state)
        state.epoch += 1
        state.commit()
        if state.epoch >= EPOCHS and (sys.argv[2] != "replaced" or hvd.size() == size):
            return


epochs = EPOCHS
if sys.argv[2] in ("run", "replaced"):
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    train(state)
    epochs = state.epoch
else:
    plain()
wrong = {str(row): float(counts[row]) for row in range(EXAMPLES) if counts[row] != epochs}
print(json.dumps({"rank": number, "size": hvd.size(), "wrong": wrong}), flush=True)
