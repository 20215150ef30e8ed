"""Handwritten digits with Horovod's elastic PyTorch API: the training goes on when processes are lost or join.

::

    horovodrun -np 4 --min-np 2 python pytorch_mnist_elastic.py
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.npz"


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process (default: %(default)s)")
    parser.add_argument("--batches-per-commit", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05, help="of one process (default: %(default)s)")
    parser.add_argument("--warmup-epochs", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DIGITS, help="images and labels (default: %(default)s)")
    return parser.parse_args()


class Metric:
    """The mean of a number over batches and processes."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.count = 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.count += 1

    @property
    def mean(self):
        return self.sum / self.count


def read_digits(path):
    """Returns the training and the held-out examples; every sixth digit is held out."""
    digits = np.load(path)
    images = torch.tensor(digits["images"].reshape(-1, 64) / 16, dtype=torch.float32)
    labels = torch.tensor(digits["labels"])
    held_out = np.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def main():
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)

    # The sampler divides what is left of an epoch among the processes that there are.
    train, test = read_digits(args.data)
    train_sampler = hvd.elastic.ElasticSampler(train)
    test_sampler = hvd.elastic.ElasticSampler(test, shuffle=False)
    train_loader = DataLoader(train, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test, args.batch_size, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def set_learning_rate(epoch, batch):
        """From the rate of one process to that of all in the first epochs (Goyal et al., 2017)."""
        done = min(1.0, (epoch + (batch + 1) / len(train_loader)) / args.warmup_epochs)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 + done * (hvd.size() - 1))

    def train_epoch(state):
        model.train()
        train_sampler.set_epoch(state.epoch)
        offset = state.batch
        for index, (images, labels) in enumerate(train_loader):
            state.batch = offset + index
            set_learning_rate(state.epoch, state.batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            state.train_sampler.record_batch(index, args.batch_size)
            if (state.batch + 1) % args.batches_per_commit == 0:
                state.commit()

    def evaluate(epoch):
        model.eval()
        loss, accuracy = Metric("held-out loss"), Metric("held-out accuracy")
        with torch.no_grad():
            for images, labels in test_loader:
                scores = model(images)
                loss.update(F.cross_entropy(scores, labels))
                accuracy.update((scores.argmax(1) == labels).float().mean())
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}: held-out loss {loss.mean:.4f}, accuracy {accuracy.mean:.4f}", flush=True)

    @hvd.elastic.run
    def train_all(state):
        while state.epoch < args.epochs:
            train_epoch(state)
            evaluate(state.epoch)
            state.epoch += 1
            state.batch = 0
            state.commit()

    def on_state_reset():
        print(f"Process {hvd.rank()} of {hvd.size()} goes on", flush=True)

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, train_sampler=train_sampler, test_sampler=test_sampler, epoch=0, batch=0
    )
    state.register_reset_callbacks([on_state_reset])
    train_all(state)


if __name__ == "__main__":
    main()
