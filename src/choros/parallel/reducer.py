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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.comm import ProcessSet, ReduceOp, Request, global_process_set
from choros.errors import ConfigError, EngineError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.fusion import FusionBuffers, Layout, plan_fusion

__all__ = ["GradientReducer", "ReduceConfig", "layout_of"]

Array = NDArray[Any]


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients are combined; what the faces' many arguments come down to.

    Attributes:
        op: ``AVERAGE`` (over examples) or ``SUM``.
        compressor: the dtype in which gradients travel.
        predivide_factor: averages divide by this much before the sum, by the rest after it.
        groups: gradients that travel together: a number of groups, or lists of indices; ``None`` for all.
        steps: backward passes for each exchange.
        average_steps: whether the passes of one exchange are averaged or summed.
        process_set: the ranks that share gradients.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    compressor: Compressor = Compression.none
    predivide_factor: float = 1.0
    groups: int | tuple[tuple[int, ...], ...] | None = None
    steps: int = 1
    average_steps: bool = True
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


def layout_of(arrays: Sequence[Array]) -> Layout:
    """The shapes and dtypes of ``arrays``."""
    return tuple((array.shape, array.dtype) for array in arrays)


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
        self._request = Request("gradients")
        self._buffers = FusionBuffers((), ())
        self._pending: list[Array] | None = None
        self._pending_examples = 0
        self._active: list[int] | None = None

    @property
    def active(self) -> bool:
        """Whether there is anybody to exchange gradients with."""
        return bool(self.config.process_set.included()) and self.config.process_set.communicator.size > 1

    def reduce(self, gradients: Sequence[Array], *, examples: int, exchange: bool = True) -> list[Array]:
        """This step's gradients of all ranks together.

        Args:
            gradients: the gradients of the mean loss of this rank's batch.
            examples: how many examples are in the batch; 1 on every rank weighs ranks alike.
            exchange: whether this is the pass at which ranks exchange; gradients of the passes before it
                are kept, and zeros are returned for them.

        Returns:
            New arrays. At an exchange, the combined gradient of ``config.steps`` passes *times* ``steps``:
            who accumulates passes divides by it.

        Raises:
            MismatchError: ranks have different gradients, or one has none to give.
        """
        self._plan(layout_of(gradients))
        if not exchange:
            self._keep(gradients, examples)
            return [np.zeros_like(gradient) for gradient in gradients]
        if self._pending is None:
            weight = examples if self._weighted else 1
            reduced = self._exchange(gradients, weight, examples, joined=False)
        else:
            self._keep(gradients, examples)
            reduced = self._exchange(self._pending, 1, self._pending_examples, joined=False)
            self._pending, self._pending_examples = None, 0
        if reduced is None:
            raise EngineError(f"a batch of {examples} examples was told, which ranks take for none.")
        return reduced

    def join(self, layout: Layout) -> int | None:
        """Goes along with the ranks that still have batches, until none has.

        Args:
            layout: the gradients' shapes and dtypes, for a rank that has not computed any.

        Returns:
            A rank (of the process set) that took part in the last update, if there is one that did not:
            then all must take over its weights. ``None`` if all ranks had equally many updates.
        """
        self._plan(self._layout or layout)
        while self._exchange(self._pending, 1, self._pending_examples, joined=True) is not None:
            self._pending, self._pending_examples = None, 0
        active, self._active = self._active, None
        everybody = self.config.process_set.communicator.size
        return active[0] if active is not None and len(active) < everybody else None

    @property
    def _weighted(self) -> bool:
        return self.config.op is ReduceOp.AVERAGE

    def _plan(self, layout: Layout) -> None:
        if layout == self._layout:
            return
        self._layout = layout
        buckets = plan_fusion(layout, self.config.group_indices(len(layout)), self.config.compressor)
        self._buffers = FusionBuffers(layout, buckets)
        config = self.config
        each = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in layout)
        sent = ", ".join(f"{bucket.dtype}[{bucket.size}]" for bucket in buckets)
        scales = f"op={config.op.value}, steps={config.steps}, predivide_factor={config.predivide_factor}"
        self._request = Request("gradients", f"{scales}, {len(layout)} arrays: {each}; sent as {sent}")

    def _keep(self, gradients: Sequence[Array], examples: int) -> None:
        weight = examples if self._weighted else 1
        with np.errstate(over="ignore", invalid="ignore"):
            parts = [gradient * gradient.dtype.type(weight) for gradient in gradients]
            if self._pending is not None:
                parts = [kept + part for kept, part in zip(self._pending, parts, strict=True)]
        self._pending = parts
        self._pending_examples += examples

    def _exchange(
        self, gradients: Sequence[Array] | None, weight: int, examples: int, *, joined: bool
    ) -> list[Array] | None:
        """One step of all ranks; a joined rank tells the examples it has kept as a negative number."""
        communicator = self.config.process_set.communicator
        with communicator.turn():
            told = communicator.agree(self._request, extent=-examples if joined else examples)
            active = [rank for rank, count in enumerate(told) if count > 0]
            if not active:
                return None
            self._active = active
            before, after = self._scales(weight, sum(map(abs, told)), communicator.size)
            # Infinities are for the loss scale to find, not for NumPy to warn of.
            with np.errstate(over="ignore", invalid="ignore"):
                # The mean over no examples is not a number.
                self._buffers.pack(gradients if examples else None, before)
                self._buffers.reduce(lambda piece: communicator.reduce_in_place(piece, ReduceOp.SUM))
                return self._buffers.unpack(after)

    def _scales(self, weight: int, examples: int, size: int) -> tuple[float, float]:
        """What gradients are multiplied by before and after the sum."""
        steps = self.config.steps
        if not self._weighted:
            return 1.0, 1.0 if self.config.average_steps else float(steps)
        after = float(steps if self.config.average_steps else steps**2)
        factor = self.config.predivide_factor
        if factor == 1.0:
            return weight / examples, after
        return weight * size / examples / factor, after * factor / size
