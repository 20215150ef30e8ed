"""Trains in folds, each with parameters, an optimizer and a state of its own; ranks are killed in some, and replaced.

Arguments: who is killed in which fold, such as ``1@0,2@1``. Each fold goes on until all ranks are there again. Prints,
as JSON, the rows that the last fold has not trained on once an epoch, as the state of Adagrad says.
"""

import json
import os
import signal
import sys

import torch

import choros.torch as hvd
from choros.comm import global_process_set

ROWS, BATCH = 103, 4
hvd.init()
number, size = hvd.rank(), hvd.size()
is_new = global_process_set.communicator.is_new
folds = dict(each.split("@")[::-1] for each in sys.argv[1].split(","))


def train_fold(fold):
    counts = torch.nn.Parameter(torch.zeros(ROWS))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adagrad([counts], lr=1.0), op=hvd.Sum, named_parameters=[("counts", counts)]
    )
    sampler = hvd.elastic.ElasticSampler(range(ROWS), seed=fold)
    loader = torch.utils.data.DataLoader(range(ROWS), batch_size=BATCH, sampler=sampler)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 1 or hvd.size() < size:
            sampler.set_epoch(state.epoch)
            while sampler.has_left():
                for index, rows in enumerate(loader):
                    if index == 2 and folds.get(str(fold)) == str(number) and not is_new:
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    (-counts[rows].sum()).backward()
                    optimizer.step()
                    sampler.record_batch(index, BATCH)
                    state.commit()
                hvd.join()
            state.epoch += 1
            state.commit()

    state = hvd.elastic.TorchState(torch.nn.ParameterList([counts]), optimizer, sampler=sampler, epoch=0)
    train(state)
    return optimizer, state.epoch


optimizer, epochs = [train_fold(fold) for fold in range(len(folds) + 1)][-1]
(sums,) = (each["sum"] for each in optimizer.state_dict()["state"].values())
wrong = {str(row): float(sums[row]) for row in range(ROWS) if sums[row] != epochs}
print(json.dumps({"rank": number, "size": hvd.size(), "wrong": wrong}), flush=True)
