"""Batch normalisation over the rows of all ranks."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from choros.comm import ProcessSet, global_process_set
from choros.parallel.moments import RankMoments


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc, unused-ignore]
    """``torch.nn.BatchNorm1d``, ``2d`` or ``3d`` with the mean and the variance of all ranks' rows.

    In the training mode every rank must call it, in the same order as its other layers; ranks may have batches of
    different sizes, and none. Gradients are those of the sum of the ranks' losses, which ``DistributedOptimizer``
    averages. In float16 and bfloat16 the moments are computed in float32. Works on any device, on a CPU as well.

    Args:
        num_features: the number of channels, the second dimension of its inputs.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics; ``None`` for their mean over all batches.
        affine: whether it has a trained scale and offset.
        track_running_stats: whether it has running statistics, which it uses outside of the training mode.
        process_set: the ranks that normalise together.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> layer = hvd.SyncBatchNorm(2)
        >>> layer(torch.tensor([[1.0, 5.0], [3.0, 7.0]])).round(decimals=3).tolist()
        [[-1.0, -1.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Any) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes inputs (rows, channels, …), not of {input.dim()} dimensions.")

    def forward(self, input: Any) -> Any:  # noqa: A002
        """Returns the normalised input, of the same shape and dtype."""
        self._check_input_dim(input)
        batch_statistics = self.training or not self.track_running_stats
        if not batch_statistics or self.process_set.communicator.size == 1:
            return super().forward(input)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = [0, *range(2, values.dim())]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        count = values.numel() // self.num_features
        local_mean = values.sum(others) / max(count, 1)
        squares = ((values - local_mean.view(shape)) ** 2).sum(others)
        moments = RankMoments(self.process_set)
        total, mean, variance = moments.combine_counted(values.new_tensor(float(count)), local_mean, squares)
        if self.training and self.track_running_stats:
            self._track(total[0], mean.detach(), variance.detach())
        normalised = (values - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _track(self, count: Any, mean: Any, variance: Any) -> None:
        """Updates the running statistics, the variance by its unbiased estimate."""
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
