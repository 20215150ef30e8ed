"""The gradient reducer: one exchange a step, whatever the framework.

A step of three ranks, of which rank 2 has run out of batches and has joined::

             rank 0            rank 1            rank 2
    (1)  32 examples       31 examples        joined: 0          agree: one control message tells all
    (2)  g0 * 32/63        g1 * 31/63         zeros              pack, scaled by the share of the examples
    (3)  ───────────────── allreduce, sum ──────────────────     one buffer a dtype, in pieces
    (4)  mean over 63      mean over 63                          unpack; ranks with a batch update alike

When all ranks have joined, (1) says so to all of them: the epoch is over for every rank at once, and those
that joined early take over the weights of one that saw the last batch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from choros.comm import Communicator, ProcessSet, ReduceOp, Request, global_process_set
from choros.config import Config
from choros.errors import ConfigError, EngineError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.compression.casts import NoCompression
from choros.parallel.reduce.device import DeviceExchange
from choros.parallel.reduce.exchange import Array, Exchange, Layout, layout_of, zeros_like

__all__ = ["GradientReducer", "ReduceConfig", "bucket_bytes", "indices_of_groups"]

#: What is sent at once while the backward pass still runs: large enough that handing it over to another thread costs
#: little, small enough that the first bucket is full early.
_BUCKET_BYTES = 8 << 20


def bucket_bytes(*, accelerated: bool, device: Any) -> int | None:
    """The size of buckets that are sent during the backward pass, ``None`` if gradients are sent after it.

    ``CHOROS_OVERLAP`` says so, or else where the model is: on a CPU the exchange would take its cores from the backward
    pass. Tensors that do not leave a GPU are exchanged in the stream that computes them, after it.

    Args:
        accelerated: the model is on something else than the CPU.
        device: as in ``ReduceConfig``.
    """
    if device is not None and device.type != "cpu":
        return None
    told = Config.from_environ(os.environ).overlap
    return _BUCKET_BYTES if (accelerated if told is None else told) else None


def indices_of_groups(
    groups: int | Sequence[Sequence[Any]], trained: Sequence[Any], kind: str
) -> int | tuple[tuple[int, ...], ...] | None:
    """``ReduceConfig.groups`` from a face's argument: a number of groups, or lists of what is trained.

    Args:
        groups: the argument; 0 is none.
        trained: all that the optimizer trains, in order.
        kind: what these are called.

    Raises:
        ConfigError: the number is negative, or a group has something that is not trained.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(f"groups={groups} must be 0 or more.")
        return groups or None
    place = {id(each): index for index, each in enumerate(trained)}
    try:
        return tuple(tuple(place[id(each)] for each in group) for group in groups)
    except KeyError:
        raise ConfigError(f"groups names a {kind} that the optimizer does not train.") from None


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients are combined; what the faces' many arguments come down to.

    Attributes:
        op: ``AVERAGE`` (over examples) or ``SUM``.
        compressor: how gradients travel.
        predivide_factor: averages divide by this much before the sum, by the rest after it.
        groups: gradients that travel together: a number of groups, or lists of indices; ``None`` for all.
        steps: backward passes for each exchange.
        average_steps: whether the passes of one exchange are averaged or summed.
        bucket_bytes: gradients are combined in buckets of about so many bytes, the last ones first, as the
            backward pass gives them; ``None``: all at once.
        device: where torch's tensors are summed without a way over the host; ``None``: gradients are host arrays.
        process_set: the ranks that share gradients.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    compressor: Compressor = Compression.none
    predivide_factor: float = 1.0
    groups: int | tuple[tuple[int, ...], ...] | None = None
    steps: int = 1
    average_steps: bool = True
    bucket_bytes: int | None = None
    device: Any = None
    process_set: ProcessSet = field(default=global_process_set)

    def __post_init__(self) -> None:
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ConfigError(f"op={self.op.value}: gradients can be combined with Average or Sum.")
        if self.predivide_factor <= 0:
            raise ConfigError(f"gradient_predivide_factor={self.predivide_factor} must be greater than 0.")
        if self.predivide_factor != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ConfigError("gradient_predivide_factor splits the division of an average: use it with op=Average.")
        if self.steps < 1:
            raise ConfigError(f"backward_passes_per_step={self.steps} must be 1 or more.")

    def group_indices(self, count: int) -> list[list[int]]:
        """The groups of ``count`` gradients; those that no group names travel in one of their own."""
        if self.groups is None or self.groups == 0:
            return [list(range(count))]
        if isinstance(self.groups, int):
            return [part.tolist() for part in np.array_split(np.arange(count), max(1, min(self.groups, count)))]
        named = [[index for index in group if index < count] for group in self.groups]
        rest = sorted(set(range(count)) - {index for group in named for index in group})
        return [group for group in (*named, rest) if group]

    def bucket_indices(self, layout: Layout) -> list[tuple[int, ...]]:
        """Which gradients are combined together, in the order in which they are sent.

        Example:
            >>> matrix = ((256, 256), np.dtype("float32"))
            >>> ReduceConfig(bucket_bytes=2**19).bucket_indices((matrix, matrix, matrix))
            [(2, 1), (0,)]
        """
        if self.bucket_bytes is None:
            return [tuple(range(len(layout)))]
        buckets: list[list[int]] = [[]]
        filled = 0
        for index in reversed(range(len(layout))):
            shape, dtype = layout[index]
            if filled >= self.bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(index)
            filled += math.prod(shape) * dtype.itemsize
        return [tuple(bucket) for bucket in buckets]


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are combined together, and what combines them."""

    indices: tuple[int, ...]
    exchange: Exchange


@final
class GradientReducer:
    """Averages the ranks' gradients over all examples they were computed from.

    Every rank of the process set calls ``reduce`` for each of its batches, and ``join`` when it has no more;
    ranks may have different numbers of batches, and batches of different sizes.

    Example:
        >>> from choros.comm.engines.threads import run_threads
        >>> def train(communicator):
        ...     reducer = GradientReducer(ReduceConfig(process_set=a_set_of(communicator)))
        ...     gradient = np.full(2, float(communicator.rank))
        ...     return reducer.reduce([gradient], examples=communicator.rank + 1)[0]
        >>> def a_set_of(communicator):
        ...     process_set = ProcessSet(communicator.ranks)
        ...     process_set.register(0, communicator.ranks, communicator)
        ...     return process_set
        >>> [mean.tolist() for mean in run_threads(train, 2)]
        [[0.6666666666666666, 0.6666666666666666], [0.6666666666666666, 0.6666666666666666]]
    """

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config
        self._layout: Layout | None = None
        self._communicator: Communicator | None = None
        self._request = Request("gradients")
        self._buckets: tuple[_Bucket, ...] = ()
        self._scales = (1.0, 1.0)
        self._folds = False
        self._brings = True
        self._pending: list[Array] | None = None
        self._pending_examples = 0
        self._active: list[int] | None = None

    @property
    def active(self) -> bool:
        """Whether there is anybody to exchange gradients with."""
        return bool(self.config.process_set.included()) and self.config.process_set.communicator.size > 1

    def reduce(
        self, gradients: Sequence[Array], *, examples: int, exchange: bool = True, layout: Layout | None = None
    ) -> list[Array]:
        """This step's gradients of all ranks together.

        Args:
            gradients: the gradients of the mean loss of this rank's batch.
            examples: how many examples are in the batch; 1 on every rank weighs ranks alike.
            exchange: whether this is the pass at which ranks exchange; gradients of the passes before it
                are kept, and zeros are returned for them.
            layout: the gradients' shapes and dtypes, where they are known already.

        Returns:
            New arrays. At an exchange, the combined gradient of ``config.steps`` passes *times* ``steps``:
            who accumulates passes divides by it.

        Raises:
            MismatchError: ranks have different gradients, or one has none to give.
        """
        self.plan(layout_of(gradients) if layout is None else layout)
        if not exchange:
            self._keep(gradients, examples)
            return [zeros_like(gradient) for gradient in gradients]
        weight = examples if self._weighted else 1
        if self._pending is not None:
            self._keep(gradients, examples)
            gradients, examples, weight = self._pending, self._pending_examples, 1
            self._pending, self._pending_examples = None, 0
        reduced = self._step(gradients, weight, examples, joined=False)
        if reduced is None:
            raise EngineError(f"a batch of {examples} examples was told, which ranks take for none.")
        return reduced

    def plan(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Prepares for gradients of ``layout``; which of them are in each bucket, in the order they are sent."""
        communicator = self.config.process_set.communicator
        if layout != self._layout or communicator is not self._communicator:
            self._layout, self._communicator = layout, communicator
            # float16 may not hold the sum of what is not scaled yet.
            wide = all(dtype != np.float16 for _, dtype in layout)
            self._folds = wide and isinstance(self.config.compressor, NoCompression)
            config = self.config
            self._buckets = tuple(
                _Bucket(indices, self._exchange_for(layout, indices)) for indices in config.bucket_indices(layout)
            )
            each = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in layout)
            sent = "; ".join(bucket.exchange.description for bucket in self._buckets)
            scales = f"op={config.op.value}, steps={config.steps}, predivide_factor={config.predivide_factor}"
            self._request = Request("gradients", f"{scales}, {len(layout)} arrays: {each}; sent as {sent}")
        return tuple(bucket.indices for bucket in self._buckets)

    def begin(self, examples: int) -> None:
        """Starts a step whose buckets are sent one by one, each as soon as it is full; ``plan`` comes first.

        Args:
            examples: as for ``reduce``.
        """
        self._agree(examples if self._weighted else 1, examples, joined=False)
        self._brings = examples > 0

    def send(self, bucket: int, gradients: Sequence[Array]) -> list[Array]:
        """Combines one bucket; every rank sends the buckets in the order of ``plan``.

        Args:
            bucket: its place in the plan.
            gradients: those whose indices the plan lists.
        """
        with self.config.process_set.communicator.turn():
            return self._sum(bucket, gradients if self._brings else None)

    def join(self, layout: Layout, on_update: Callable[[list[Array]], None] | None = None) -> int | None:
        """Goes along with the ranks that still have batches, until none has.

        Args:
            layout: the gradients' shapes and dtypes, for a rank that has not computed any.
            on_update: called with the combined gradients of each of those steps.

        Returns:
            A rank (of the process set) that took part in the last update, if there is one that did not:
            then all must take over its weights. ``None`` if all ranks had equally many updates.
        """
        self.plan(self._layout or layout)
        while (reduced := self._step(self._pending, 1, self._pending_examples, joined=True)) is not None:
            self._pending, self._pending_examples = None, 0
            if on_update is not None:
                on_update(reduced)
        active, self._active = self._active, None
        everybody = self.config.process_set.communicator.size
        return active[0] if active is not None and len(active) < everybody else None

    @property
    def _weighted(self) -> bool:
        return self.config.op is ReduceOp.AVERAGE

    def _exchange_for(self, layout: Layout, indices: Sequence[int]) -> Exchange:
        """What moves the gradients ``indices``; groups of arrays keep together within a bucket."""
        place = {index: position for position, index in enumerate(indices)}
        groups = [[place[i] for i in group if i in place] for group in self.config.group_indices(len(layout))]
        part = tuple(layout[index] for index in indices)
        groups = [group for group in groups if group]
        communicator, compressor = self.config.process_set.communicator, self.config.compressor
        if self.config.device is not None:
            return DeviceExchange(communicator, part, groups, compressor.wire_dtype, self.config.device)
        return compressor.exchange(communicator, part, groups)

    def _keep(self, gradients: Sequence[Array], examples: int) -> None:
        weight = examples if self._weighted else 1
        with np.errstate(over="ignore", invalid="ignore"):
            parts = [gradient * weight for gradient in gradients]
            if self._pending is not None:
                parts = [kept + part for kept, part in zip(self._pending, parts, strict=True)]
        self._pending = parts
        self._pending_examples += examples

    def _step(
        self, gradients: Sequence[Array] | None, weight: int, examples: int, *, joined: bool
    ) -> list[Array] | None:
        """One step of all ranks; ``None`` if all have joined."""
        with self.config.process_set.communicator.turn():
            if not self._agree(weight, examples, joined=joined):
                return None
            results: dict[int, Array] = {}
            for number, bucket in enumerate(self._buckets):
                # The mean over no examples is not a number: such a rank brings zeros.
                mine = [gradients[index] for index in bucket.indices] if gradients and examples else None
                results.update(zip(bucket.indices, self._sum(number, mine), strict=True))
        return [results[index] for index in range(len(results))]

    def _agree(self, weight: int, examples: int, *, joined: bool) -> bool:
        """The control message; a joined rank tells the examples it has kept as a negative number.

        Returns:
            Whether any rank had a batch.
        """
        communicator = self.config.process_set.communicator
        with communicator.turn():
            told = communicator.agree(self._request, extent=-examples if joined else examples)
        active = [rank for rank, count in enumerate(told) if count > 0]
        if active:
            self._active = active
            before, after = self._scales_of(weight, sum(map(abs, told)), communicator.size)
            # What all ranks multiply by alike can be done on the way out, where it costs nothing.
            alike = self._folds and len(set(told)) == 1
            self._scales = (1.0, before * after) if alike else (before, after)
        return bool(active)

    def _sum(self, bucket: int, gradients: Sequence[Array] | None) -> list[Array]:
        if bucket > 0:
            # Between buckets the user's program goes on: another collective of one rank's must not meet ours.
            self.config.process_set.communicator.agree(_bucket_request(bucket))
        # Infinities are for the loss scale to find, not for NumPy to warn of.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._buckets[bucket].exchange.sum(gradients, *self._scales)

    def _scales_of(self, weight: int, examples: int, size: int) -> tuple[float, float]:
        """What gradients are multiplied by before and after the sum."""
        steps = self.config.steps
        if not self._weighted:
            return 1.0, 1.0 if self.config.average_steps else float(steps)
        after = float(steps if self.config.average_steps else steps**2)
        factor = self.config.predivide_factor
        if factor == 1.0:
            return weight / examples, after
        return weight * size / examples / factor, after * factor / size


@functools.lru_cache(maxsize=256)
def _bucket_request(bucket: int) -> Request:
    return Request("gradients", f"bucket {bucket}")
