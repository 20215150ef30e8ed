"""The gradient reducer: one reduction per step, for every framework.

A step of three ranks, of which rank 2 has no more batches and has joined::

             rank 0            rank 1            rank 2
    (1)  32 examples       31 examples        joined: 0          agree: one control message to all ranks
    (2)  g0 * 32/63        g1 * 31/63         zeros              pack, scaled by the share of the examples
    (3)  ───────────────── allreduce, sum ──────────────────     one buffer per dtype, in chunks
    (4)  mean over 63      mean over 63                          unpack; ranks with a batch update

When all ranks have joined, (1) reports it to all of them: the epoch ends on all ranks at the same time, and ranks
that joined early receive the weights of a rank that had the last batch.

With micro-batches (1) precedes each of them, because a gradient's weight is its rank's share of the examples of *its*
micro-batch; (2) to (4) follow the last one. Micro-batches have the same weight, whatever their sizes, as in Keras::

             rank 0                            rank 1
    (1)  16 examples: pending  = g0 * 16/32    16 examples: pending = g1 * 16/32
    (1)   1 example:  pending += g0 *  1/1     joined
    (2)  pending                               pending
    (3)  ────────────────────── allreduce, sum ──────────────────────

A rank that is lost takes what it has pending with it. At the end of an epoch's batches all ranks exchange what they
have (``reduce_early``), and Keras' optimizers accumulate it: then it is on all of them.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import cloudpickle
import numpy as np

from choros.comm import ProcessSet, Reduction, Request, global_process_set
from choros.comm.fusion import Layout
from choros.comm.membership import Membership
from choros.config import COMPARE_EVERY, DIVERGENCE, Config
from choros.errors import ConfigError, EngineError
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import page
from choros.parallel.compression import Compression, Compressor, check_compressor
from choros.parallel.compression.casts import NoCompression
from choros.parallel.identical import Comparison
from choros.parallel.reduce.device import DeviceExchange, TensorDevice
from choros.parallel.reduce.exchange import Array, Exchange
from choros.parallel.reduce.gradients import (
    Gradient,
    GradientLayout,
    dense_layout,
    describe,
    layout_of,
    zeros_like,
    zeros_of,
)
from choros.parallel.reduce.joining import Participation, join
from choros.parallel.reduce.sparse import RowsExchange, RowsLayout
from choros.parallel.reduce.split import Groups, SplitExchange, only

__all__ = ["GradientReducer", "ReduceConfig", "bucket_bytes", "indices_of_groups"]

#: The size of buckets that are sent during the backward pass: large enough that passing one to another thread costs
#: little, small enough that the first bucket is full early.
_BUCKET_BYTES = 8 << 20
#: Whether and when ranks compare what they train, by default.
_COMPARES = (int(COMPARE_EVERY.default), DIVERGENCE.default)
#: The plans that are kept. Optimizers that are applied to parts of a model alternate between a few layouts.
_PLANS = 8


def bucket_bytes(*, accelerated: bool, device: TensorDevice | None) -> int | None:
    """Returns the size of buckets that are sent during the backward pass; ``None`` if gradients are sent after it.

    ``CHOROS_OVERLAP`` decides; by default only gradients of accelerators are sent during the backward pass, because on
    a CPU the reduction would compete with it for cores. Tensors that stay on a GPU are reduced after the backward pass,
    in the stream that computes them.

    Args:
        accelerated: whether the model is on an accelerator.
        device: as in ``ReduceConfig``.
    """
    if device is not None and device.type != "cpu":
        return None
    overlap = Config.from_environ(os.environ).overlap
    return _BUCKET_BYTES if (accelerated if overlap is None else overlap) else None


def indices_of_groups(
    groups: int | Sequence[Sequence[Any]], trained: Sequence[Any], kind: str
) -> int | tuple[tuple[int, ...], ...] | None:
    """Returns ``ReduceConfig.groups`` for a user's argument: a number of groups, or lists of trained objects.

    Args:
        groups: the argument; 0 for no groups.
        trained: the variables or parameters that the optimizer trains, in order.
        kind: their name in error messages.

    Raises:
        ConfigError: the number is negative, or a group contains an object that is not trained.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(f"groups={groups} must be 0 or more.")
        return groups or None
    index_of = {id(each): index for index, each in enumerate(trained)}
    try:
        return tuple(tuple(index_of[id(each)] for each in group) for group in groups)
    except KeyError:
        raise ConfigError(f"groups contains a {kind} that the optimizer does not train: remove it.") from None


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients are reduced: the settings of all distributed optimizers.

    Attributes:
        op: ``AVERAGE`` (over examples) or ``SUM``.
        compressor: the compression of gradients.
        predivide_factor: averages divide by this factor before the sum, and by the rest after it.
        groups: gradients that are sent together: a number of groups, or lists of indices; ``None`` for one group.
        micro_batches: the number of micro-batches, that is backward passes, per reduction.
        average_micro_batches: whether their gradients are averaged or summed; each of them has the same weight.
        bucket_bytes: the approximate size of buckets, which are reduced in the order of the backward pass: the last
            layers' first; ``None``: all gradients are reduced at once.
        device: where tensors are summed without host staging; ``None``: gradients are host arrays.
        compared_step: the step, from 1, after which ranks first compare the values of what they train; they do so again
            after each ``CHOROS_COMPARE_EVERY`` steps. Of gradients of each layout, steps for which all ranks have a
            batch count.
        process_set: the ranks that share gradients.
    """

    op: Reduction = Reduction.AVERAGE
    compressor: Compressor = Compression.none
    predivide_factor: float = 1.0
    groups: int | tuple[tuple[int, ...], ...] | None = None
    micro_batches: int = 1
    average_micro_batches: bool = True
    bucket_bytes: int | None = None
    device: TensorDevice | None = None
    compared_step: int = 2
    process_set: ProcessSet = field(default=global_process_set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Reduction(self.op))
        check_compressor(self.compressor)
        if self.op not in (Reduction.AVERAGE, Reduction.SUM):
            raise ConfigError(f"op={self.op.value}: gradients can be reduced with Average or Sum only.")
        if self.predivide_factor <= 0:
            raise ConfigError(f"gradient_predivide_factor={self.predivide_factor} must be greater than 0.")
        if self.predivide_factor != 1.0 and self.op is not Reduction.AVERAGE:
            raise ConfigError("gradient_predivide_factor splits the division of an average: it needs op=Average.")
        if self.micro_batches < 1:
            raise ConfigError(f"backward_passes_per_step={self.micro_batches} must be 1 or more.")

    def group_indices(self, count: int) -> list[list[int]]:
        """Returns the groups of ``count`` gradients; those that are in no given group form another one."""
        if self.groups is None or self.groups == 0:
            return [list(range(count))]
        if isinstance(self.groups, int):
            return [part.tolist() for part in np.array_split(np.arange(count), max(1, min(self.groups, count)))]
        named = [[index for index in group if index < count] for group in self.groups]
        rest = sorted(set(range(count)) - {index for group in named for index in group})
        return [group for group in (*named, rest) if group]

    def bucket_indices(self, layout: GradientLayout) -> list[tuple[int, ...]]:
        """Returns the indices of the gradients in each bucket, in the order in which buckets are sent.

        Sparse gradients are all in the last one: embeddings are a model's first layers.

        Example:
            >>> matrix = ((256, 256), np.dtype("float32"))
            >>> ReduceConfig(bucket_bytes=2**19).bucket_indices((matrix, matrix, matrix))
            [(2, 1), (0,)]
        """
        if self.bucket_bytes is None:
            return [tuple(range(len(layout)))]
        buckets: list[list[int]] = [[]]
        filled = 0
        sparse = [index for index, each in enumerate(layout) if isinstance(each, RowsLayout)]
        for index in reversed(range(len(layout))):
            if index in sparse:
                continue
            shape, dtype = layout[index][:2]
            if filled >= self.bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(index)
            filled += math.prod(shape) * dtype.itemsize
        buckets[-1] += sparse
        return [tuple(bucket) for bucket in buckets]


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are reduced together, and the exchange that sums them."""

    indices: tuple[int, ...]
    exchange: Exchange


@dataclass(frozen=True)
class _Plan:
    """How gradients of one layout are reduced.

    Attributes:
        layout: their shapes and dtypes.
        buckets: in the order in which they are sent.
        request: the request of a step, that is of its last micro-batch.
        first_bucket: the request of the first bucket of a step whose buckets are sent one by one.
        micro_batch: the request of a micro-batch before the last.
        early: the request of an exchange before the last micro-batch.
        scales_late: whether they may be scaled after the sum.
    """

    layout: GradientLayout
    buckets: tuple[_Bucket, ...]
    request: Request
    first_bucket: Request
    micro_batch: Request
    early: Request
    scales_late: bool


@dataclass(frozen=True)
class _ReducerState:
    """How far a reducer is; a step that is made again after a rank was lost begins with that of before.

    Attributes:
        batches: the batches, micro-batches included.
        steps: the steps.
        common_steps: for each layout, those for which all ranks had a batch: two models may be trained in turn.
        accumulated: for each layout, the number of micro-batches since the last exchange, the same on all ranks.
        pending: for each layout, this rank's gradients of these; a rank without rows has none.
    """

    batches: int = 0
    steps: int = 0
    common_steps: Mapping[GradientLayout, int] = field(default_factory=dict)
    accumulated: Mapping[GradientLayout, int] = field(default_factory=dict)
    pending: Mapping[GradientLayout, list[Gradient]] = field(default_factory=dict)


@final
class GradientReducer:
    """Averages the ranks' gradients over all examples of the step.

    Every rank of the process set calls ``reduce`` for each of its batches, and ``join`` when it has no more;
    ranks may have different numbers of batches, and batches of different sizes.

    Attributes:
        config: the argument.
        due: the comparison of what ranks train, after the update that follows the last ``reduce``; ``None`` if ranks
            compare nothing then. The same on all ranks.
        divergence: what happens if ranks differ then, as ``CHOROS_DIVERGENCE`` says.
        trained: once all ranks have joined, those that had a batch in the last step, as the launcher numbers them.

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

    def __init__(self, config: ReduceConfig, name: str = "") -> None:
        """Creates a reducer.

        Args:
            config: the configuration.
            name: distinguishes it from others whose gradients have the same shapes; the same on every rank.
        """
        self.config = config
        self._name = name
        self._membership: Membership | None = None
        self._plans: dict[GradientLayout, _Plan] = {}
        self._plan: _Plan | None = None
        self._scales = (1.0, 1.0)
        self._factor = 1.0
        #: This rank's share of the examples in the last step of all ranks; ``None`` before the first step.
        self.share: float | None = None
        self._weight = 1.0
        #: Those who had a batch in the last step, as the launcher numbers them.
        self._active: list[int] | None = None
        self.trained: tuple[int, ...] = ()
        #: In the current step; and as of the last one that has ended on all ranks.
        self._progress = self._settled = _ReducerState()
        #: The last step that has begun; it may be made again.
        self._begun = 0
        #: Returns the factor of gradients whose loss was weighted for ranks of which some were lost since.
        self.correction: Callable[[], float] | None = None
        environment = Config.from_environ(os.environ)
        self._compare_every, self.divergence = environment.compare_every, environment.divergence
        self.due: Comparison | None = None

    @property
    def active(self) -> bool:
        """Whether there are other ranks to reduce gradients with, or may be: the last rank counts its steps, too."""
        process_set = self.config.process_set
        return bool(process_set.included()) and process_set.communicator.may_have_others

    @property
    def may_repeat(self) -> bool:
        """Whether a step may be made again, with the same gradients, because a rank was lost in it."""
        return bool(self.config.process_set.included()) and self.config.process_set.communicator.elastic

    @property
    def batches(self) -> int:
        """The number of batches, micro-batches included, that all ranks have reduced together, or accumulated."""
        return self._settled.batches

    @property
    def accumulated(self) -> int:
        """How many of the last of these are not reduced yet: if a rank is lost, its part of them is lost."""
        return max(self._settled.accumulated.values(), default=0)

    def reduce(
        self,
        gradients: Sequence[Gradient],
        *,
        examples: int,
        exchange: bool = True,
        layout: GradientLayout | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Gradient]:
        """Reduces this step's gradients over all ranks.

        Args:
            gradients: the gradients of the mean loss of this rank's batch.
            examples: the number of examples in the batch; 1 on every rank gives all ranks the same weight.
            exchange: whether this is the last micro-batch of the step, after which ranks reduce; the gradients of
                earlier ones are accumulated here, and zeros are returned for them.
            layout: the gradients' shapes and dtypes, where they are known already.
            out: arrays into which the results may be written; ``gradients`` themselves, unless this ``may_repeat``.

        Returns:
            ``out``, or new arrays. After the last micro-batch, the sum over the micro-batches of
            their reduced gradients, because the optimizer that accumulates micro-batches divides by their number;
            *times* that number if ``config.average_micro_batches`` is false.

        Raises:
            MismatchError: ranks have different gradients, or a rank has none.
        """
        kinds = layout_of(gradients) if layout is None else layout
        communicator = self.config.process_set.communicator
        factor = self._correction()

        def again() -> None:
            nonlocal factor
            factor = self._correction()

        def collective() -> list[Gradient]:
            self._begin_again()
            self.plan(kinds)
            self._agree(self._current.request if exchange else self._current.micro_batch, examples, exchange=exchange)
            if exchange:
                return self._exchange(_times(factor, gradients) if examples else None, out)
            if examples:
                self._accumulate(_times(factor, gradients))
            return [zeros_like(gradient) for gradient in gradients]

        return communicator.atomic(collective, again=again)

    def reduce_early(self) -> dict[GradientLayout, list[Gradient]]:
        """Reduces the gradients of the micro-batches since the last exchange, before the step's last; all call it.

        ``reduce`` then returns those of later micro-batches alone: the caller accumulates these.

        Returns:
            For each layout, what ``reduce`` would return; empty if there are none.
        """

        def collective(layout: GradientLayout) -> list[Gradient]:
            self.plan(layout)
            communicator.agree(self._current.early)
            return self._exchange_early(layout)

        communicator = self.config.process_set.communicator
        layouts = tuple(self._settled.accumulated)
        return {each: communicator.atomic(functools.partial(collective, each)) for each in layouts}

    def _exchange_early(self, layout: GradientLayout) -> list[Gradient]:
        self._begin_again()
        self.plan(layout)
        self._note(accumulated=self._accumulated(exchange=True))
        self._scale(1.0, same=False)
        return self._exchange(None)

    def forget_accumulated(self) -> int:
        """Forgets the micro-batches since the last exchange, which is not to come; returns their number."""
        number = self.accumulated
        self._settled = replace(self._settled, batches=self.batches - number, accumulated={}, pending={})
        self._progress = self._settled
        return number

    def plan(self, layout: GradientLayout) -> tuple[tuple[int, ...], ...]:
        """Prepares for gradients of ``layout``; returns the indices in each bucket, in the order buckets are sent."""
        membership = self.config.process_set.membership
        if membership != self._membership:
            self._membership, self._plans = membership, {}
            self._plan = None
            self._note(common_steps={})  # a new rank has counted none
            self._settled = replace(self._settled, common_steps={})
        if self._plan is None or layout != self._plan.layout:
            if layout not in self._plans:
                if len(self._plans) == _PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[layout] = self._plan_for(layout)
            self._plan = self._plans[layout]
        return tuple(bucket.indices for bucket in self._plan.buckets)

    def send(
        self, bucket: int, gradients: Sequence[Gradient], *, examples: int, out: Sequence[Array] | None = None
    ) -> list[Gradient] | None:
        """Reduces one bucket of a step as soon as it is full; call ``plan`` first.

        Every rank sends all buckets in the order of the plan. If a rank is lost after the first one, the shares of the
        examples, and some of the sums, are those of the ranks before: ``reduce`` then makes the step again::

                      rank 0           rank 1           rank 2
            bucket 0  shares, sum      shares, sum      shares, sum
            bucket 1  sum              sum              killed
            bucket 2  None             None
            reduce    shares, sums     shares, sums                    of the gradients in all buckets

        Args:
            bucket: its position in the plan.
            gradients: the gradients at the indices that the plan lists for it.
            examples: as for ``reduce``; the same for all buckets.
            out: as for ``reduce``.

        Returns:
            As ``reduce``; ``None`` if a rank was lost in this step. If the last bucket's are ``None``, call ``reduce``
            with all gradients.
        """
        layout, communicator = self._current.layout, self.config.process_set.communicator

        def correct() -> None:
            self._factor = self._correction()

        def collective() -> list[Gradient] | None:
            if bucket == 0:
                self._begin_again()
                self.plan(layout)
                self._agree(self._current.first_bucket, examples, exchange=True)
            else:
                # Between buckets the user's program runs: its collective on one rank must not be matched with this one.
                communicator.agree(_bucket_request(bucket, self._name))
            return self._sum_unless_lost(bucket, _times(self._factor, gradients) if examples else None, out)

        if bucket > 0:
            return communicator.atomic(collective)
        correct()
        return communicator.atomic(collective, again=correct)

    def _sum_unless_lost(
        self, bucket: int, gradients: Sequence[Gradient] | None, out: Sequence[Array] | None = None
    ) -> list[Gradient] | None:
        """``_sum``, unless the first bucket's shares were those of other ranks: the same on all of them."""
        lost = self._membership != self.config.process_set.membership
        return None if lost else self._sum(bucket, gradients, out)

    def join(
        self,
        layout: GradientLayout,
        on_update: Callable[[list[Gradient]], None] | None = None,
        alternatives: Sequence[GradientLayout] = (),
    ) -> int | None:
        """Participates with zeros until no rank has more batches.

        Args:
            layout: the gradients' shapes and dtypes, for a rank that has not computed any.
            on_update: called with what ``reduce`` would have returned for each of those batches.
            alternatives: other layouts that such a rank expects, because it does not know which gradients are sparse.

        Returns:
            As ``last_active``.
        """
        join(self.config.process_set.communicator, self.participation(layout, on_update, alternatives))
        return self.last_active()

    def participation(
        self,
        layout: GradientLayout,
        on_update: Callable[[list[Gradient]], None] | None = None,
        alternatives: Sequence[GradientLayout] = (),
    ) -> Participation:
        """Returns how a rank without batches participates; the arguments are those of ``join``."""
        if self._plan is None:
            for each in (*alternatives, layout):
                self.plan(each)

        received: dict[int, Gradient] = {}

        def update(reduced: list[Gradient]) -> None:
            if on_update is not None:
                on_update(reduced)

        def accumulate(counts: Sequence[int], layout: GradientLayout) -> None:
            self._begin_again()
            self.plan(layout)
            self._begin(counts, 0, exchange=False, joined=True)
            update(zeros_of(layout))

        def exchange(counts: Sequence[int], layout: GradientLayout) -> None:
            self._begin_again()
            self.plan(layout)
            self._begin(counts, 0, exchange=True, joined=True)
            update(self._exchange(None))

        def sum_first_bucket(counts: Sequence[int], layout: GradientLayout) -> None:
            self._begin_again()
            self.plan(layout)
            self._begin(counts, 0, exchange=True, joined=True)
            received.clear()
            sum_bucket(counts, 0)

        def exchange_early(_: Sequence[int], layout: GradientLayout) -> None:
            self._exchange_early(layout)  # this rank receives the optimizer's accumulators with the weights

        def sum_bucket(_: Sequence[int], bucket: int) -> None:
            buckets = self._current.buckets
            sums = self._sum_unless_lost(bucket, None)
            if sums is None:
                return
            received.update(zip(buckets[bucket].indices, sums, strict=True))
            if bucket == len(buckets) - 1:
                update([received.pop(index) for index in sorted(received)])

        parts: dict[Request, Callable[[Sequence[int]], None]] = {}
        for plan in self._plans.values():
            parts[plan.request] = functools.partial(exchange, layout=plan.layout)
            parts[plan.first_bucket] = functools.partial(sum_first_bucket, layout=plan.layout)
            parts[plan.micro_batch] = functools.partial(accumulate, layout=plan.layout)
            parts[plan.early] = functools.partial(exchange_early, layout=plan.layout)
            # Between buckets, the backward pass of the others may call other collectives.
            parts |= {
                _bucket_request(bucket, self._name): functools.partial(sum_bucket, bucket=bucket)
                for bucket in range(1, len(plan.buckets))
            }
        return parts

    def _explain(self, layout: GradientLayout) -> bytes:
        """The message for ``learned``: all but what each process chooses for itself."""
        own = ("process_set", "device", "bucket_bytes")
        settings = {each.name: getattr(self.config, each.name) for each in fields(self.config) if each.name not in own}
        return bytes(cloudpickle.dumps((settings, self._name, layout)))

    @classmethod
    def learned(
        cls, message: bytes, process_set: ProcessSet, configure: Callable[[ReduceConfig], ReduceConfig]
    ) -> Participation:
        """Returns how a rank that has no reducer participates without batches in the steps of the others'.

        Args:
            message: the explanation of their request.
            process_set: the ranks that share gradients.
            configure: sets the device and the size of buckets.
        """
        settings, name, layout = cloudpickle.loads(message)
        return cls(configure(ReduceConfig(**settings, process_set=process_set)), name).participation(layout)

    def last_active(self, heirs: Sequence[int] = ()) -> int | None:
        """Returns a rank (of the process set) that had a batch in the last step, once all ranks have joined.

        Args:
            heirs: others that have made its update, as the launcher numbers them.

        Returns:
            ``None`` if no rank was without a batch in that step, or there was no step; else all must receive the
            weights of the rank that is returned.

        Raises:
            PeerLostError: all that have made the update were lost.
        """
        active, self._active = self._active, None
        self.trained = tuple(active or ())
        communicator = self.config.process_set.communicator
        if active is None or set(active) >= set(communicator.launched):
            return None
        return communicator.first_left([*active, *heirs], "the only rank with rows in the last step")

    @property
    def _weighted(self) -> bool:
        return self.config.op is Reduction.AVERAGE

    def _plan_for(self, layout: GradientLayout) -> _Plan:
        config = self.config
        buckets = tuple(
            _Bucket(indices, self._exchange_for(layout, indices)) for indices in config.bucket_indices(layout)
        )
        sent = "; ".join(bucket.exchange.description for bucket in buckets)
        scales = f"op={config.op.value}, predivide_factor={config.predivide_factor}"
        counts = f"micro_batches={config.micro_batches}, {len(layout)} arrays"
        if (self._compare_every, self.divergence) != _COMPARES:
            counts += f", compared every {self._compare_every} steps, divergence={self.divergence}"
        arguments = f"{scales}, {counts}: {describe(layout)}; sent as {sent}"
        explain = None if config.compressor.shares_state else functools.partial(self._explain, layout)
        step, first_bucket, micro_batch, early = (
            Request(each, arguments, self._name, explain=explain)
            for each in ("gradients", "gradients in buckets", "micro-batch", "gradients of micro-batches")
        )
        # The sum of unscaled values may overflow float16.
        fits = all(each[1] != np.float16 for each in layout)
        late = fits and isinstance(config.compressor, NoCompression)
        return _Plan(layout, buckets, step, first_bucket, micro_batch, early, scales_late=late)

    @property
    def _current(self) -> _Plan:
        if self._plan is None:
            raise EngineError("no gradients are planned: call plan() first.")
        return self._plan

    def _exchange_for(self, layout: GradientLayout, indices: Sequence[int]) -> Exchange:
        """Returns the exchange of the gradients at ``indices``; groups are kept together within a bucket."""
        unfused = Config.from_environ(os.environ).fusion_bytes == 0
        together = [[i] for i in range(len(layout))] if unfused else self.config.group_indices(len(layout))
        part, groups = only(indices, dense_layout(layout), together)
        rows = [
            (position, each) for position, index in enumerate(indices) if isinstance(each := layout[index], RowsLayout)
        ]
        if not rows:
            return self._dense_exchange(part, groups)
        sparse = [position for position, _ in rows]
        dense = [position for position in range(len(part)) if position not in sparse]
        communicator, row_dtype = self.config.process_set.communicator, self.config.compressor.row_dtype
        parts: list[tuple[list[int], Exchange]] = [
            (sparse, RowsExchange(communicator, [each for _, each in rows], row_dtype))
        ]
        if dense:
            parts.insert(0, (dense, self._dense_exchange(*only(dense, part, groups))))
        return SplitExchange(parts)

    def _dense_exchange(self, layout: Layout, groups: Groups) -> Exchange:
        communicator, compressor = self.config.process_set.communicator, self.config.compressor
        if self.config.device is not None:
            return DeviceExchange(communicator, layout, groups, compressor.wire_dtype, self.config.device)
        return compressor.exchange(communicator, layout, groups)

    def _accumulate(self, gradients: Sequence[Gradient]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            parts = [gradient * self._weight for gradient in gradients]
            if (pending := self._progress.pending.get(self._current.layout)) is not None:
                parts = [earlier + part for earlier, part in zip(pending, parts, strict=True)]
        self._note(pending={**self._progress.pending, self._current.layout: parts})

    def _exchange(self, gradients: Sequence[Gradient] | None, out: Sequence[Array] | None = None) -> list[Gradient]:
        """Reduces the gradients of the last micro-batch, and those that are pending; ``None``: this rank has none."""
        layout = self._current.layout
        if layout in self._progress.pending:
            if gradients is not None:
                self._accumulate(gradients)
            pending = dict(self._progress.pending)
            gradients = pending.pop(layout)
            self._note(pending=pending)
            self._scale(1.0, same=False)
        results: dict[int, Gradient] = {}
        for number, bucket in enumerate(self._current.buckets):
            own = None if gradients is None else [gradients[index] for index in bucket.indices]
            targets = None if out is None else [out[index] for index in bucket.indices]
            results.update(zip(bucket.indices, self._sum(number, own, targets), strict=True))
        return [results[index] for index in range(len(results))]

    def _agree(self, request: Request, examples: int, *, exchange: bool) -> None:
        """Exchanges the control message of a step, or of a micro-batch before its last."""
        counts = self.config.process_set.communicator.agree(request, value=examples)
        self._begin(counts, examples, exchange=exchange, joined=False)

    def _begin(self, counts: Sequence[int], examples: int, *, exchange: bool, joined: bool) -> None:
        """Notes the number of examples that each rank has in the micro-batch."""
        if not any(counts):
            raise EngineError(f"the batch has {examples} examples, and no other rank has any: expected 1 or more.")
        launched = self.config.process_set.communicator.launched
        self._active = [each for each, count in zip(launched, counts, strict=True) if count > 0]
        self.share = examples / sum(counts)
        self._weight = self.share if self._weighted else 1.0
        progress = self._progress
        accumulated = self._accumulated(exchange=exchange)
        self._note(batches=progress.batches + 1, steps=progress.steps + exchange, accumulated=accumulated)
        self.due = self._comparison() if exchange and len(self._active) == len(counts) else None
        if exchange and self._progress.steps != self._begun:
            self._begun = self._progress.steps
            if not joined:
                page.note_step()
            events.emit(Kind.STEP_BEGUN, self._name, step=self._begun, examples=examples, joined=joined)
        if exchange:
            # With several micro-batches ranks may differ in whether they have accumulated gradients of earlier ones.
            self._scale(self._weight, same=self.config.micro_batches == 1 and len(set(counts)) == 1)
        else:
            self.config.process_set.communicator.when_settled(self._end)

    def _accumulated(self, *, exchange: bool) -> dict[GradientLayout, int]:
        """Counts one more micro-batch, or forgets those that are exchanged."""
        accumulated, layout = dict(self._progress.accumulated), self._current.layout
        number = accumulated.pop(layout, 0)
        return accumulated if exchange else {**accumulated, layout: number + 1}

    def _comparison(self) -> Comparison | None:
        """Counts a step of all ranks; returns the comparison after it."""
        layout, first, every = self._current.layout, self.config.compared_step, self._compare_every
        step = self._progress.common_steps.get(layout, 0) + 1
        self._note(common_steps={**self._progress.common_steps, layout: step})
        due = step == first or (step > first and every > 0 and step % every == 0)
        return Comparison(step, first, self.divergence) if due else None

    def _correction(self) -> float:
        elastic = self.correction is not None and self.config.process_set.communicator.elastic
        return self.correction() if elastic and self.correction is not None else 1.0

    def _begin_again(self) -> None:
        """Forgets what an attempt of this collective has noted during which a rank was lost."""
        if self.config.process_set.communicator.elastic:
            self._progress = self._settled

    def _end(self) -> None:
        self._settled = self._progress

    def _note(self, **changed: Any) -> None:
        self._progress = replace(self._progress, **changed)

    def _scale(self, weight: float, *, same: bool) -> None:
        """Sets the factors of gradients before and after the sum.

        Args:
            weight: the factor of this rank's gradients.
            same: whether it is the same on all ranks.
        """
        size, divisor = self.config.process_set.communicator.size, self.config.predivide_factor
        before, after = weight, 1.0 if self.config.average_micro_batches else float(self.config.micro_batches)
        if divisor != 1.0:
            before, after = before * size / divisor, after * divisor / size
        # A factor that is the same on all ranks is applied while unpacking, where it costs nothing.
        self._scales = (1.0, before * after) if same and self._current.scales_late else (before, after)

    def _sum(
        self, bucket: int, gradients: Sequence[Gradient] | None, out: Sequence[Array] | None = None
    ) -> list[Gradient]:
        buckets = self._current.buckets
        # Infinities are detected by the loss scale: NumPy must not warn of them.
        events.emit(Kind.BUCKET_BEGUN, self._name, bucket=bucket, arrays=len(buckets[bucket].indices))
        with np.errstate(over="ignore", invalid="ignore"):
            exchange = buckets[bucket].exchange
            if gradients is None or out is None:
                reduced = exchange.sum(gradients, *self._scales)
            else:
                reduced = exchange.sum_into(out, gradients, *self._scales)
        events.emit(Kind.BUCKET_DONE, self._name, bucket=bucket)
        if bucket == len(buckets) - 1:
            events.emit(Kind.STEP_DONE, self._name, step=self._progress.steps)
            self.config.process_set.communicator.when_settled(self._end)
        return reduced


def _times(factor: float, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
    return gradients if factor == 1.0 else [gradient * factor for gradient in gradients]


@functools.lru_cache(maxsize=256)
def _bucket_request(bucket: int, name: str) -> Request:
    return Request("gradients", f"bucket {bucket}", name)
