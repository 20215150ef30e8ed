"""Handwritten digits with Horovod's PyTorch API.

On one process, and on two, with each of the ways to average gradients::

    python pytorch_mnist.py
    horovodrun -np 2 python pytorch_mnist.py
    horovodrun -np 2 python pytorch_mnist.py --fp16-allreduce
    horovodrun -np 2 python pytorch_mnist.py --gradient-predivide-factor 2
    horovodrun -np 2 python pytorch_mnist.py --use-adasum
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.npz"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(16 * 3 * 3, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, images):
        features = F.max_pool2d(F.relu(self.conv(images)), 2)
        hidden = F.relu(self.hidden(features.flatten(1)))
        return self.out(self.dropout(hidden))


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="of one process (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DIGITS, help="images and labels (default: %(default)s)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in float16")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before the sum")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum, not by their mean")
    return parser.parse_args()


def read_digits(path):
    """Returns the training and the held-out examples; every sixth digit is held out."""
    digits = np.load(path)
    images = torch.tensor(digits["images"][:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits["labels"])
    held_out = np.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def main():
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    # Each process trains on its own part of the data.
    train, test = read_digits(args.data)
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test, 200, sampler=test_sampler)

    # The mean over more examples allows longer steps; Adasum chooses their length itself.
    model = Net().to(device)
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)

    # All processes begin with the weights of the first.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        loss, accuracy = evaluate(model, test_loader, device)
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}: held-out loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)


def evaluate(model, loader, device):
    """Returns the mean loss and the accuracy over the parts of all processes, which have the same lengths."""
    model.eval()
    losses, right = [], []
    with torch.no_grad():
        for images, labels in loader:
            scores = model(images.to(device))
            losses.append(F.cross_entropy(scores, labels.to(device), reduction="none"))
            right.append((scores.argmax(1) == labels.to(device)).float())
    means = torch.stack([torch.cat(losses).mean(), torch.cat(right).mean()])
    return hvd.allreduce(means, name="held out").tolist()


if __name__ == "__main__":
    main()
