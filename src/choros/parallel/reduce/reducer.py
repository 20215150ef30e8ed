"""The gradient reducer: one reduction per step, for every framework.

A step of three ranks, of which rank 2 has no more batches and has joined::

             rank 0            rank 1            rank 2
    (1)  32 examples       31 examples        joined: 0          agree: one control message to all ranks
    (2)  g0 * 32/63        g1 * 31/63         zeros              pack, scaled by the share of the examples
    (3)  ───────────────── allreduce, sum ──────────────────     one buffer per dtype, in chunks
    (4)  mean over 63      mean over 63                          unpack; ranks with a batch update

When all have joined, (1) reports it to all: the epoch ends on all ranks at once, and ranks that joined early
receive the weights of one that had the last batch. With micro-batches (1) precedes each, as a gradient's weight is
its rank's share of *its* micro-batch; (2) to (4) follow the last. Micro-batches weigh the same, whatever their
sizes, as in Keras::

             rank 0                            rank 1
    (1)  16 examples: pending  = g0 * 16/32    16 examples: pending = g1 * 16/32
    (1)   1 example:  pending += g0 *  1/1     joined
    (2)  pending                               pending
    (3)  ────────────────────── allreduce, sum ──────────────────────

A rank that is lost takes what it has pending with it. At the end of an epoch's batches all ranks exchange what
they have (``reduce_early``), and Keras' optimizers accumulate it: then it is on all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import cloudpickle
import numpy as np

from choros.comm import Array, Communicator, ProcessSet, Reduction, Request, has_others
from choros.comm.joining import Participation, join
from choros.errors import ConfigError, EngineError
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import page
from choros.parallel.identical import Comparison
from choros.parallel.reduce.gradients import Gradient, GradientLayout, layout_of, squared_norm, zeros_like
from choros.parallel.reduce.noise import Contribution, Estimate, announced, heard, publish, updated
from choros.parallel.reduce.plan import Plan, ReduceConfig, plan_for
from choros.settings import current

#: Called with what ``reduce`` would have returned, and its layout.
OnUpdate = Callable[[GradientLayout, list[Gradient]], None]
#: The plans that are kept. Optimizers that are applied to parts of a model alternate between a few layouts.
_PLANS = 8


@dataclass(frozen=True)
class _LayoutState:
    """How far gradients of one layout are: the steps for which all ranks had a batch; the micro-batches since the last
    exchange (the same on all ranks), and this rank's gradients of these, if any had rows. Of their noise: this rank's
    ``share`` of the current step, the steps since a measured one (ranks that came later have others), the estimate.
    """

    common_steps: int = 0
    accumulated: int = 0
    pending: list[Gradient] | None = None
    share: Contribution = field(default_factory=Contribution)
    unmeasured: int = 0
    estimate: Estimate = field(default_factory=Estimate)

    def adding(self, gradients: Sequence[Gradient], weight: float) -> _LayoutState:
        with np.errstate(over="ignore", invalid="ignore"):
            parts = [gradient * weight for gradient in gradients]
            if self.pending is not None:
                parts = [earlier + part for earlier, part in zip(self.pending, parts, strict=True)]
        return replace(self, pending=parts)


#: That of a layout of which this rank has seen no step.
_NEW = _LayoutState()


@dataclass(frozen=True)
class _ReducerState:
    """How far a reducer is; by layout, too, as two models may train in turn. ``latest``: the last estimate of noise."""

    batches: int = 0
    steps: int = 0
    layouts: Mapping[GradientLayout, _LayoutState] = field(default_factory=dict)
    latest: Estimate | None = None

    def noting(self, layout: GradientLayout, state: _LayoutState, **changes: Any) -> _ReducerState:
        return replace(self, layouts={**self.layouts, layout: state}, **changes)

    def changing_all(self, **changes: Any) -> _ReducerState:
        return replace(self, layouts={each: replace(state, **changes) for each, state in self.layouts.items()})


@final
class GradientReducer:
    """Averages gradients over a step's examples; ranks ``reduce`` each batch, in any number and size, then ``join``.
    ``due``: the comparison after the next update.

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
        """``name`` tells it from others whose gradients have the same shapes; the same on every rank."""
        self.config = config
        self.process_set = config.process_set
        self.name = name
        #: That of the process set for which there are plans.
        self._epoch = 0
        self._plans: dict[GradientLayout, Plan] = {}
        self._plan: Plan | None = None
        self._scales = (1.0, 1.0)
        #: This rank's share of the examples in the last step of all ranks; ``None`` before the first step.
        self.share: float | None = None
        self._weight = 1.0
        #: Those who had a batch in the last step, as the launcher numbers them, until ``last_active``.
        self.trained: list[int] | None = None
        #: In the current step; and as of the last one that has ended on all ranks, from which the next begins, also if
        #: a rank was lost and it is made again.
        self._progress = self._settled = _ReducerState()
        #: In a measured step (``noise.py``), the squared norms of this rank's gradients, and of the sum.
        self._norms: list[Any] | None = None
        #: The last step that has begun.
        self._begun = 0
        #: Returns the factor of gradients whose loss was weighted for ranks of which some were lost since.
        self.correction: Callable[[], float] = lambda: 1.0
        self._factor = 1.0
        environment = current()
        self.compare_every, self.divergence = environment.compare_every, environment.divergence
        self._measure_every = environment.noise_scale
        self.due: Comparison | None = None

    def rename(self, name: str) -> None:
        """Gives it another name, between two steps, on every rank."""
        if name != self.name:
            self.name, self._plan = name, None
            self._plans.clear()

    @property
    def active(self) -> bool:
        """Whether there are other ranks to reduce gradients with, or may be: the last rank counts its steps, too."""
        return has_others(self.process_set)

    @property
    def may_repeat(self) -> bool:
        """Whether a step may be made again, with the same gradients, because a rank was lost in it."""
        return bool(self.process_set.included()) and self.process_set.communicator.elastic

    @property
    def batches(self) -> int:
        """The number of batches, micro-batches included, that all ranks have reduced together, or accumulated."""
        return self._settled.batches

    @property
    def accumulated(self) -> int:
        """How many of the last of these are not reduced yet: if a rank is lost, its part of them is lost."""
        return max((each.accumulated for each in self._settled.layouts.values()), default=0)

    def reduce(
        self,
        gradients: Sequence[Gradient],
        *,
        examples: int,
        exchange: bool = True,
        layout: GradientLayout | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Gradient]:
        """Reduces this step's gradients of the mean loss of this rank's batch; zeros before its last micro-batch. Then
        the *sum* over micro-batches, as the optimizer divides by their number; *times* that unless it averages. Of what
        has ``ranges`` in the layout it returns this rank's items.
        Results may be written to ``out``: not ``gradients`` themselves, if this ``may_repeat``.
        """
        kinds = layout_of(gradients) if layout is None else layout
        communicator = self.process_set.communicator

        def collective() -> list[Gradient]:
            plan = self._planned(kinds)
            counts = self._counts(plan, plan.request if exchange else plan.micro_batch, examples)
            self._begin(plan, counts, examples, exchange=exchange)
            own = _times(self._factor, gradients) if examples else None
            if exchange:
                return self._exchange(plan, own, out)
            if own is not None:
                self._progress = self._progress.noting(kinds, self._progress.layouts[kinds].adding(own, self._weight))
            communicator.when_settled(self._settle)
            if plan.sliced:
                return [each.of_rank(communicator.rank).zeros() for each in plan.layout]
            return [zeros_like(gradient) for gradient in gradients]

        if communicator.elastic:
            self._correct()
        return communicator.atomic(collective, again=self._correct)

    def reduce_early(self) -> dict[GradientLayout, list[Gradient]]:
        """Reduces earlier micro-batches, on all ranks; the caller adds what ``reduce`` returns for later ones."""
        communicator = self.process_set.communicator

        def collective(layout: GradientLayout) -> list[Gradient]:
            plan = self._planned(layout)
            communicator.agree(plan.early)
            return self._exchange(plan, None)

        layouts = [each for each, state in self._settled.layouts.items() if state.accumulated]
        return {each: communicator.atomic(functools.partial(collective, each)) for each in layouts}

    def forget_accumulated(self) -> int:
        """Forgets the micro-batches since the last exchange, which is not to come; returns their number."""
        number, settled = self.accumulated, self._settled.changing_all(accumulated=0, pending=None)
        self._settled = replace(settled, batches=self.batches - number)
        return number

    def plan(self, layout: GradientLayout) -> tuple[tuple[int, ...], ...]:
        """Prepares for gradients of ``layout``; returns the indices in each bucket, in the order buckets are sent."""
        return self._planned(layout).indices

    def send(
        self, bucket: int, gradients: Sequence[Gradient], *, examples: int, out: Sequence[Array] | None = None
    ) -> list[Gradient] | None:
        """Reduces one bucket of a step as soon as it is full; call ``plan`` first, and send all in its order.

        If a rank is lost after the first bucket, shares and some sums are those of the ranks before: it returns
        ``None``. If the last one's is ``None``, call ``reduce`` with all gradients, which makes the step again::

                      rank 0           rank 1           rank 2
            bucket 0  shares, sum      shares, sum      shares, sum
            bucket 1  sum              sum              killed
            bucket 2  None             None
            reduce    shares, sums     shares, sums                    of the gradients in all buckets
        """
        plan, communicator = self._plan, self.process_set.communicator
        if plan is None:
            raise EngineError("no gradients are planned: call plan() first.")

        def collective() -> list[Gradient] | None:
            if bucket == 0:
                now = self._planned(plan.layout)
                self._begin(now, self._counts(now, now.first_bucket, examples), examples, exchange=True)
            else:
                # Between buckets the user's program runs: its collective on one rank must not be matched with this one.
                now = plan
                communicator.agree(_bucket_request(bucket, self.name))
                if self._epoch != self.process_set.epoch:
                    return None
            return self._sum(now, bucket, _times(self._factor, gradients) if examples else None, out)

        if bucket > 0:
            return communicator.atomic(collective)
        if communicator.elastic:
            self._correct()
        return communicator.atomic(collective, again=self._correct)

    def join(self, layout: GradientLayout, on_update: OnUpdate = lambda *_: None) -> int | None:
        """Participates with zeros until no rank has more batches; returns as ``last_active``. ``on_update`` is called
        with what ``reduce`` would have returned for each.
        """
        join(self.process_set.communicator, self.participation(layout, on_update))
        return self.last_active()

    def participation(
        self,
        layout: GradientLayout,
        on_update: OnUpdate = lambda *_: None,
        alternatives: Sequence[GradientLayout] = (),
        on_early: OnUpdate = lambda *_: None,
    ) -> Participation:
        """Returns how a rank without batches participates; see ``join``. One that has computed no gradients gives
        ``alternatives`` to ``layout``, as it does not know which are sparse. ``on_early`` is called with what the
        others' ``reduce_early`` returns.
        """
        if self._plan is None:
            for each in (*alternatives, layout):
                self.plan(each)

        received: dict[int, Gradient] = {}

        def begin(counts: Sequence[int], layout: GradientLayout, *, exchange: bool = True) -> Plan:
            plan = self._planned(layout)
            self._begin(plan, counts, 0, exchange=exchange, joined=True)
            return plan

        def accumulate(counts: Sequence[int], layout: GradientLayout) -> None:
            plan = begin(counts, layout, exchange=False)
            plan.communicator.when_settled(self._settle)
            on_update(layout, [each.of_rank(plan.communicator.rank).zeros() for each in layout])

        def exchange(counts: Sequence[int], layout: GradientLayout) -> None:
            on_update(layout, self._exchange(begin(counts, layout), None))

        def sum_first_bucket(counts: Sequence[int], layout: GradientLayout) -> None:
            begin(counts, layout)
            received.clear()
            sum_bucket(counts, 0)

        def exchange_early(_: Sequence[int], layout: GradientLayout) -> None:
            on_early(layout, self._exchange(self._planned(layout), None))

        def sum_bucket(_: Sequence[int], bucket: int) -> None:
            plan = self._plan
            if plan is None or self._epoch != self.process_set.epoch:
                return
            received.update(zip(plan.indices[bucket], self._sum(plan, bucket, None), strict=True))
            if bucket == len(plan.indices) - 1:
                on_update(plan.layout, [received.pop(index) for index in sorted(received)])

        parts: dict[Request, Callable[[Sequence[int]], None]] = {}
        for plan in self._plans.values():
            parts[plan.request] = functools.partial(exchange, layout=plan.layout)
            parts[plan.first_bucket] = functools.partial(sum_first_bucket, layout=plan.layout)
            parts[plan.micro_batch] = functools.partial(accumulate, layout=plan.layout)
            parts[plan.early] = functools.partial(exchange_early, layout=plan.layout)
            # Between buckets, the backward pass of the others may call other collectives.
            parts |= {
                _bucket_request(bucket, self.name): functools.partial(sum_bucket, bucket=bucket)
                for bucket in range(1, len(plan.indices))
            }
        return parts

    @classmethod
    def learned(
        cls, message: bytes, process_set: ProcessSet, configure: Callable[[ReduceConfig], ReduceConfig]
    ) -> Participation:
        """Returns how a rank without reducer and batches participates in others' steps, as ``message`` explains."""
        settings, name, layout = cloudpickle.loads(message)
        return cls(configure(ReduceConfig(**settings, process_set=process_set)), name).participation(layout)

    def last_active(self, heirs: Sequence[int] = ()) -> int | None:
        """Once all have joined, a rank with a batch in the last step, whose weights all must receive; or of ``heirs``.
        ``None`` if no rank was without one, or there was no step; if all that made the update were lost, PeerLostError.
        """
        active, self.trained = self.trained, None
        communicator = self.process_set.communicator
        if active is None or set(active) >= set(communicator.launched):
            return None
        return communicator.first_left([*active, *heirs], "the only rank with rows in the last step")

    def _planned(self, layout: GradientLayout) -> Plan:
        """Returns the plan of a step that begins, or begins again: what it noted before is forgotten."""
        if self._epoch != self.process_set.epoch:
            self._epoch, self._plans, self._plan = self.process_set.epoch, {}, None
            self._settled = self._settled.changing_all(common_steps=0)  # a new rank has counted none
        self._progress, self._norms, plan = self._settled, None, self._plan
        if plan is None or layout != plan.layout:
            if layout not in self._plans:
                if len(self._plans) == _PLANS:
                    del self._plans[next(iter(self._plans))]
                compares = self.compare_every, self.divergence
                self._plans[layout] = plan_for(self.config, self.name, layout, compares)
            plan = self._plan = self._plans[layout]
        return plan

    def _correct(self) -> None:
        self._factor = self.correction()

    def _counts(self, plan: Plan, request: Request, examples: int) -> list[int]:
        """Agrees on a micro-batch; returns the values of all ranks, from which ``_begin`` learns their examples."""
        problem = ConfigError(f"examples={examples}: expected the number in the batch.") if examples < 0 else None
        value = examples
        if self._measure_every:
            state = self._progress.layouts.get(plan.layout, _NEW)
            value = announced(examples, due=state.unmeasured + 1 >= self._measure_every)
        return plan.communicator.agree(request, value=value, problem=problem)

    def _begin(self, plan: Plan, counts: Sequence[int], examples: int, *, exchange: bool, joined: bool = False) -> None:
        """Notes the number of examples that each rank has in the micro-batch."""
        done, state, due = self._progress, self._progress.layouts.get(plan.layout, _NEW), False
        if self._measure_every:
            counts, due = heard(counts)
        total = sum(counts)
        if not total:
            raise EngineError(f"the batch has {examples} examples, and no other rank has any: expected 1 or more.")
        self.trained = [each for each, count in zip(plan.communicator.launched, counts, strict=True) if count > 0]
        self.share = examples / total
        self._weight = self.share if self.config.op is Reduction.AVERAGE else 1.0
        self.due = None
        if self._measure_every:
            share = (state.share if state.accumulated else Contribution()).adding(self._weight, examples)
            state = replace(state, share=share, unmeasured=state.unmeasured + exchange)
            if due and exchange and plan.measures:
                self._norms = [0.0, 0.0]
        if not exchange:
            state = replace(state, accumulated=state.accumulated + 1)
            self._progress = done.noting(plan.layout, state, batches=done.batches + 1)
            return
        if len(self.trained) == len(counts):
            step, first, every = state.common_steps + 1, self.config.compared_step, self.compare_every
            state = replace(state, common_steps=step)
            is_power_of_two = step & (step - 1) == 0  # what is wrong from the start is found early
            if step == first or (
                step > first and every > 0 and (step % every == 0 or (step < every and is_power_of_two))
            ):
                self.due = Comparison(step, first, self.divergence)
        self._progress = done.noting(plan.layout, state, batches=done.batches + 1, steps=done.steps + 1)
        if self._progress.steps != self._begun:
            self._begun = self._progress.steps
            if not joined:
                page.note_step(examples)
            if Kind.STEP_BEGUN in events.heard:
                events.emit(Kind.STEP_BEGUN, self.name, step=self._begun, examples=examples, joined=joined)
        # With several micro-batches ranks may differ in whether they have accumulated gradients of earlier ones.
        same = self.config.micro_batches == 1 and len(set(counts)) == 1
        self._scales = _scales(plan, self._weight, same=same)

    def _exchange(
        self, plan: Plan, gradients: Sequence[Gradient] | None, out: Sequence[Array] | None = None
    ) -> list[Gradient]:
        """Reduces the last micro-batch's gradients (``None``: this rank, or each, has none), and those pending."""
        state = self._progress.layouts.get(plan.layout, _NEW)
        if state.pending is not None:
            gradients = state.pending if gradients is None else state.adding(gradients, self._weight).pending
        if state.pending is not None or gradients is None:
            self._scales = _scales(plan, 1.0, same=False)
        if state.accumulated:
            self._progress = self._progress.noting(plan.layout, replace(state, accumulated=0, pending=None))
        results: dict[int, Gradient] = {}
        for number, indices in enumerate(plan.indices):
            own = None if gradients is None else [gradients[index] for index in indices]
            targets = None if out is None else [out[index] for index in indices]
            results.update(zip(indices, self._sum(plan, number, own, targets), strict=True))
        return [results[index] for index in range(len(results))]

    def _sum(
        self, plan: Plan, bucket: int, gradients: Sequence[Gradient] | None, out: Sequence[Array] | None = None
    ) -> list[Gradient]:
        if Kind.BUCKET_BEGUN in events.heard:
            events.emit(Kind.BUCKET_BEGUN, self.name, bucket=bucket, arrays=len(plan.indices[bucket]))
        exchange, norms = plan.exchanges[bucket], self._norms
        if norms is not None and gradients is not None:
            factor = math.prod(self._scales)
            norms[0] += squared_norm(gradients) * (factor * factor)
        # Infinities are detected by the loss scale: NumPy must not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            reduced = exchange.sum(gradients, *self._scales, out)
        if Kind.BUCKET_DONE in events.heard:
            events.emit(Kind.BUCKET_DONE, self.name, bucket=bucket)
        if norms is not None:
            norms[1] += squared_norm(reduced)
        if bucket == len(plan.indices) - 1:
            if norms is not None:
                state = _measured(self._progress.layouts[plan.layout], norms, plan.communicator)
                latest = state.estimate if state.estimate.steps else self._progress.latest
                self._progress, self._norms = self._progress.noting(plan.layout, state, latest=latest), None
            if Kind.STEP_DONE in events.heard:
                events.emit(Kind.STEP_DONE, self.name, step=self._progress.steps)
            plan.communicator.when_settled(self._settle)
        return reduced

    def _settle(self) -> None:
        self._settled = self._progress
        if self._settled.latest is not None:  # it stays as it is until a step had rows on two ranks
            publish(self._settled.latest)


def _measured(state: _LayoutState, norms: Sequence[Any], communicator: Communicator) -> _LayoutState:
    """After a step, gathers 64 bytes of each rank, in its section; ``norms``: of this rank's gradients, and of the sum.
    Of the earlier estimates that with the most steps goes on, so that ranks that came later have the same.
    """
    own = np.array([float(norms[0]), *state.share, *state.estimate], np.float64)
    gathered = communicator.gather_bytes(own.view(np.uint8), [own.nbytes] * communicator.size)
    rows = gathered.view(np.float64).reshape(communicator.size, -1).tolist()
    before, shares = max(Estimate(*row[4:]) for row in rows), [Contribution(*row[1:4]) for row in rows]
    return replace(state, unmeasured=0, estimate=updated(before, [row[0] for row in rows], shares, float(norms[1])))


def _scales(plan: Plan, weight: float, *, same: bool) -> tuple[float, float]:
    """Returns the factors before and after the sum for this rank's ``weight``; ``same``: all ranks have it."""
    config, size, divisor = plan.config, plan.communicator.size, plan.config.predivide_factor
    before, after = weight, 1.0 if config.average_micro_batches else float(config.micro_batches)
    if divisor != 1.0:
        before, after = before * size / divisor, after * divisor / size
    # A factor that is the same on all ranks is applied while unpacking, where it costs nothing.
    return (1.0, before * after) if same and plan.scales_late else (before, after)


def _times(factor: float, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
    return gradients if factor == 1.0 else [gradient * factor for gradient in gradients]


@functools.lru_cache(maxsize=256)
def _bucket_request(bucket: int, name: str) -> Request:
    return Request("gradients", f"bucket {bucket}", name)
