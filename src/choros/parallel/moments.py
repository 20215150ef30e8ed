"""The mean and the variance of all ranks' rows, from those of each: for synchronised batch normalisation.

One message a layer in the forward pass, and one in the backward pass::

    rank 0, 31 rows              rank 1, 17 rows              rank 2, without rows
    count, mean, squares         count, mean, squares         joined
            └──────── allreduce of n, n·mean, squares + n·mean² ────────┘      forward, in float64
    mean and variance of 48      the same
            ┊                            ┊
    their gradients, times w0    times w1                     joined
            └───────────────── allreduce, sum ──────────────────┘              backward
    divided by w0                by w1

The ranks minimise one loss together, in which the loss of a rank has the weight w, its number of examples where
the reducer averages gradients over examples. Every loss depends on the moments, and the reducer weights its
gradients once more; hence the factors.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array, ProcessSet, Request, global_process_set
from choros.comm.request import CollectiveSpec
from choros.comm.transfers import sum_numbers

_DIFFER = (
    "the ranks' layers normalise different numbers of channels together; they sent {} numbers: all ranks must have the "
    "same model, and call its layers in the same order."
)
_MOMENTS, _GRADIENT = (
    Request(collective, spec=CollectiveSpec("sum", differ=_DIFFER))
    for collective in ("moments of a layer's inputs", "gradient of the moments")
)


@final
@dataclass(frozen=True)
class RankMoments:
    """Combines the moments of the ranks' rows; its own only, where ``exchanges`` says that others do not call it.

    >>> import choros
    >>> choros.init()
    >>> RankMoments().combine(np.array(4.0), np.array([1.5]), np.array([8.0]))
    (array([1.5]), array([2.]))
    """

    process_set: ProcessSet = global_process_set
    weight: Any = 1
    exchanges: Callable[[], bool] = lambda: True

    def combine(self, count: Any, mean: Any, squares: Any) -> tuple[Any, Any]:
        """Returns the mean and the variance over the rows of all ranks; see ``combine_counted``."""
        _, center, variance = self.combine_counted(count, mean, squares)
        return center, variance

    def combine_counted(self, count: Any, mean: Any, squares: Any) -> tuple[Any, Any, Any]:
        """Returns the number of all ranks' rows, 1 if there are none, their mean and their variance; one per channel.
        Mean and variance are differentiable, also repeatedly. ``squares`` sums the squared deviations from ``mean``.
        """
        adapter = adapter_of(mean)
        spec = adapter.spec(mean)
        hold = adapter.stop_gradient
        divisor, center, variance = adapter.host_call(
            self._combine, list(map(hold, (count, mean, squares))), [spec] * 3
        )
        # These are exact, but constants. The terms that carry the gradient are zero: the mean is the sum of the ranks'
        # first terms, and the variance that of the second ones, minus (mean - center)².
        terms = [mean * count / divisor, (squares + count * (mean - center) ** 2) / divisor]
        first, second = adapter.with_gradient(list, functools.partial(self._sum, weighted=True), terms)
        deviation = first - hold(first)
        return divisor, center + deviation, variance + (second - hold(second)) - deviation * deviation

    def _combine(self, hosts: Sequence[Array]) -> Sequence[Array]:
        dtype = hosts[1].dtype
        count, mean, squares = (host.astype(np.float64) for host in hosts)
        sums = np.stack([np.broadcast_to(count, mean.shape), count * mean, squares + count * mean**2])
        self._allreduce(_MOMENTS, sums)
        divisor = np.maximum(sums[0], 1.0)
        center = sums[1] / divisor
        variance = np.maximum(sums[2] / divisor - center**2, 0.0)
        return [each.astype(dtype) for each in (divisor, center, variance)]

    def _sum(self, arrays: Sequence[Any], *, weighted: bool) -> list[Any]:
        """The sum over the ranks, with the factors drawn above if ``weighted``; each is the other's adjoint."""
        adapter = adapter_of(arrays[0])
        known = not weighted or isinstance(self.weight, int)

        def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
            weight = float(hosts[-1]) if not known else self.weight if weighted else 1
            values = hosts[: len(arrays)]
            sums = np.stack([host.astype(np.float64) for host in values])
            sums = sums * weight if weight else np.zeros_like(sums)  # infinities, too
            self._allreduce(_GRADIENT, sums)
            back = 1 / weight if weight else 0.0
            return [(each * back).astype(host.dtype) for each, host in zip(sums, values, strict=True)]

        def forward(given: Sequence[Any]) -> list[Any]:
            return adapter.host_call(on_host, given, [adapter.spec(each) for each in arrays])

        def backward(gradients: Sequence[Any]) -> list[Any]:
            return [*self._sum(gradients, weighted=not weighted), *([] if known else [None])]

        return adapter.with_gradient(forward, backward, [*arrays] if known else [*arrays, self.weight])

    def _allreduce(self, request: Request, sums: Array) -> None:
        if not self.exchanges():
            return
        communicator = self.process_set.communicator

        def collective() -> Array:
            total = sums.flatten() if communicator.elastic else sums.reshape(-1)
            sum_numbers(communicator, total, communicator.agree(request, value=sums.size), _DIFFER)
            return total

        sums[...] = communicator.atomic(collective).reshape(sums.shape)
