"""A user's script for Horovod's PyTorch API: a global batch has the same rows for any number of ranks."""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import choros.torch as hvd

DIGITS = Path(__file__).parents[2] / "examples" / "digits.npz"
GLOBAL_BATCH, TRAIN, EPOCHS = 64, 23 * 64, 5

hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()}", flush=True)
torch.manual_seed(hvd.rank())

digits = np.load(DIGITS)
images = torch.tensor(digits["images"].reshape(-1, 64) / 16, dtype=torch.float32)
labels = torch.tensor(digits["labels"])
train = TensorDataset(images[:TRAIN], labels[:TRAIN])
sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=1)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for rows, classes in DataLoader(train, GLOBAL_BATCH // hvd.size(), sampler=sampler):
        optimizer.zero_grad()
        loss = cross_entropy(model(rows), classes)
        loss.backward()
        optimizer.step()

start, stop = hvd.shard_range(len(labels) - TRAIN, hvd.rank(), hvd.size())
with torch.no_grad():
    right = model(images[TRAIN + start : TRAIN + stop]).argmax(1) == labels[TRAIN + start : TRAIN + stop]
accuracy = hvd.allreduce(right.sum(), op=hvd.Sum).item() / (len(labels) - TRAIN)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.4f}", flush=True)
