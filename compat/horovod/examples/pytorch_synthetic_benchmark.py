"""Images a second of a PyTorch model with Horovod, on random images.

::

    horovodrun -np 2 python pytorch_synthetic_benchmark.py
    horovodrun -np 2 python pytorch_synthetic_benchmark.py --model resnet50 --image-size 224 --batch-size 32

``--model`` is ``small``, or the name of a model of torchvision, if that is installed.
"""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import horovod.torch as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="small", help="small, or a model of torchvision")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of images")
    parser.add_argument("--batch-size", type=int, default=8, help="images of a step of each process")
    parser.add_argument("--num-warmup-batches", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="steps of a measurement")
    parser.add_argument("--num-iters", type=int, default=5, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    return parser.parse_args()


def build_model(name):
    """Returns a model with batch normalisation over all processes."""
    if name != "small":
        from torchvision import models

        return getattr(models, name)(norm_layer=hvd.SyncBatchNorm)
    layers = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, bias=False), hvd.SyncBatchNorm(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))


def main():
    args = parse_arguments()
    hvd.init()
    on_gpu = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    name = "GPU" if on_gpu else "CPU"

    model = build_model(args.model).to(device)
    # Adasum chooses the length of steps itself; on GPUs it does so for the means over the processes of each host.
    scale = hvd.size()
    if args.use_adasum:
        scale = hvd.local_size() if on_gpu and hvd.nccl_built() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the GPU

    log(f"Model {args.model}, {args.batch_size} images for each of {hvd.size()} {name}(s)")
    timeit.timeit(step, number=args.num_warmup_batches)
    speeds = []
    for index in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        speeds.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iteration {index}: {speeds[-1]:.1f} images/s on each {name}")
    mean, spread = np.mean(speeds), 1.96 * np.std(speeds)
    log(f"On each {name}: {mean:.1f} +- {spread:.1f} images/s")
    log(f"On {hvd.size()} {name}(s): {hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f} images/s")


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
