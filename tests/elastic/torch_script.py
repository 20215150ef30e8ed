"""A loop of PyTorch over an ElasticSampler: counts[i] is how often example i was trained on; see ``fit_script.py``.

Arguments: the faults (see ``faults.py``), and ``run`` for ``hvd.elastic.run``, ``plain`` for the loop alone,
``replaced`` for ``run`` until all ranks are there again. ``1@left:1`` is as rank 1 asks for the second time what is
left. With CHOROS_OVERLAP=1 there are three lists of counts, each of which is a bucket. EXAMPLES is their number. With
CHOROS_SHARD_STATE, the state of Adagrad counts the examples, too: the sum of the squares of their gradients.
"""

import json
import os
import sys

import torch
from faults import Faults

import choros.torch as hvd
from choros.comm import global_process_set
from choros.parallel.reduce import plan

EXAMPLES, BATCH, EPOCHS = int(os.environ.get("EXAMPLES", "103")), 4, 2
hvd.init()
number, size = hvd.rank(), hvd.size()
faults = Faults(sys.argv[1], global_process_set.communicator)
lists = 1
if os.environ.get("CHOROS_OVERLAP") == "1":
    lists, plan._BUCKET_BYTES = 3, 1
counts = [torch.nn.Parameter(torch.zeros(EXAMPLES)) for _ in range(lists)]
model = torch.nn.Module()
model.counts = torch.nn.ParameterList(counts)
shards = bool(os.environ.get("CHOROS_SHARD_STATE"))
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adagrad(counts, lr=1.0) if shards else torch.optim.SGD(counts, lr=1.0),
    op=hvd.Sum,
    named_parameters=model.named_parameters(),
)
sampler = hvd.elastic.ElasticSampler(range(EXAMPLES), seed=3)
loader = torch.utils.data.DataLoader(range(EXAMPLES), batch_size=BATCH, sampler=sampler)


def train_epoch(state=None):
    for index, rows in enumerate(loader):
        faults.come("step")
        optimizer.zero_grad()
        (-sum(each[rows].sum() for each in counts)).backward()
        optimizer.step()
        sampler.record_batch(index, BATCH)
        if state is not None and index % 3 == 2:
            state.commit()
    hvd.join()


def plain():
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        while faults.come("left") or sampler.has_left():
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
report = {"rank": number, "size": hvd.size()}
sums = counts
if shards:
    own = [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    report |= {
        "held": sum(each.numel() for each in own) / EXAMPLES / lists,
        "weights": [round(float(each[0]) - sum(k**-0.5 for k in range(1, epochs + 1)), 5) for each in counts],
    }
    sums = [state["sum"] for state in optimizer.state_dict()["state"].values()]
report["wrong"] = {str(row): float(each[row]) for each in sums for row in range(EXAMPLES) if each[row] != epochs}
print(json.dumps(report), flush=True)
