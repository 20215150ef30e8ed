"""Reduction of torch gradients during the backward pass.

Autograd calls a hook for each gradient, the last layers' first; buckets of them are sent from another thread while
earlier layers still compute, in the order of the plan, as ranks may fill them in different orders::

    this thread      g9 g8 g7 │ g4 │ g6 g5 │ g3 g2 g1 g0 │ reduce: wait ──► reduced gradients
                              ▼            ▼             ▼              ▲
    queue's thread        send 0         send 1        send 2 ──────────┘
                       g9 g8 g7        g6 g5 g4     g3 g2 g1 g0

A parameter that the backward pass did not reach counts as zeros; ``reduce`` sends its bucket and those after it.
If a rank was lost meanwhile, it reduces all again. Without overlap hooks only count, and ``reduce`` reduces all
at once. Only gradients tell which are sparse (``gradients.py``), and a rank may lack one. So no bucket of the first
step is sent early, and ranks agree on the kinds::

    rank 0                     rank 1                     rank 2, without batches
    has a sparse gradient: 1   none: 0                    joined                     agree
    which ones ────────────────┬──────────────────────────┘                          allreduce, maximum; if one has any
    same layout                same layout                same layout
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from choros.arrays import framework_adapter
from choros.comm import Array, ProcessSet, Reduction, Request, Work, global_process_set
from choros.errors import ConfigError, EngineError
from choros.parallel.identical import Comparison, check_identical
from choros.parallel.reduce.gradients import (
    Gradient,
    GradientKind,
    GradientLayout,
    Ranges,
    SparseRows,
    describe,
    layout_of,
)
from choros.parallel.reduce.reducer import GradientReducer, OnUpdate


@dataclass
class _Step:
    """Gradients since the last reduction; ``complete`` has each one's version, which detects later changes."""

    micro_batches: list[int]
    missing: list[int]
    complete: dict[int, tuple[Any, int]] = field(default_factory=dict)
    works: list[Work[list[Array] | None]] = field(default_factory=list)


@final
class BackwardExchange:
    """Reduces torch gradients, during the backward pass or after it; ``reduce`` once per ``micro_batches`` passes."""

    def __init__(
        self,
        reducer: GradientReducer,
        parameters: Sequence[Any],
        *,
        micro_batches: int = 1,
        gathers_rows: bool = False,
        examples: Callable[[], int | None] = lambda: 1,
        ranges: Callable[[Any], Ranges] | None = None,
    ) -> None:
        """Registers hooks on ``parameters``, leaves of the autograd graph in the same order on all ranks. Sparse
        gradients are reduced as dense ones unless ``gathers_rows``. Where ``examples()`` is ``None``, the pass is no
        training step. ``ranges`` says how the gradient of a parameter is divided, for ``scatter``.
        """
        self.reducer = reducer
        self._overlap = reducer.config.bucket_bytes is not None
        #: Backward passes before each reduction.
        self.micro_batches = micro_batches
        self._gathers_rows = gathers_rows
        self._examples = examples
        self._ranges = ranges
        self._adapter = framework_adapter("torch")
        self._lock = threading.Lock()  # Autograd runs hooks in one thread per device.
        self._hooks: list[Any] = []
        self._step: _Step
        weakref.finalize(self, _remove, self._hooks)
        self._register(parameters)

    @property
    def passes(self) -> int:
        """The number of backward passes whose gradients are not reduced yet."""
        return max(self._step.micro_batches, default=0)

    def reduce(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Returns the reduced gradients, ``None`` as zeros; to other parameters hooks move, and sent buckets go."""
        self._follow(parameters)
        results = self._finish(gradients)
        on_device = self.reducer.config.device is not None
        triples = zip(results, parameters, gradients, strict=True)
        return [_tensor_of(*each, on_device=on_device) for each in triples]

    def scatter(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """As ``reduce``, but returns this rank's items only, flat; of sparse gradients the rows that have these."""
        self._follow(parameters)
        return self.items_of(self._finish(gradients, divided=True))

    def items_of(self, results: Sequence[Gradient]) -> list[Any]:
        """Returns as tensors what the reducer returns of the gradients that ``scatter`` divides."""
        on_device = self.reducer.config.device is not None
        pairs = zip(results, self._parameters, strict=True)
        return [_tensor_of(result, parameter, None, on_device=on_device) for result, parameter in pairs]

    def _follow(self, parameters: Sequence[Any]) -> None:
        """Moves the hooks to other parameters, once the buckets are reduced that any rank may have begun to send."""
        if [id(parameter) for parameter in parameters] != self._ids:
            if self._overlap and self._kinds_known:
                self._finish([parameter.grad for parameter in self._parameters])
            self._register(parameters)

    def abandon(self) -> None:
        """Forgets the gradients computed since the last reduction, after waiting for buckets that are being sent."""
        works = self._step.works
        self._step = self._new_step()
        for work in works:
            with suppress(EngineError):  # this is why they are abandoned
                work.wait()

    def participate(
        self,
        parts: dict[Request, Callable[[Sequence[int]], None]],
        on_update: OnUpdate = lambda *_: None,
    ) -> None:
        """Adds to ``parts`` how this rank participates without gradients: see ``joining.join``. ``on_update`` is called
        with what the reducer returns.
        """

        def participate() -> None:
            if self._ranges is not None:
                self.reducer.plan(self._divided(self._layout))
            parts.update(self.reducer.participation(self._layout, on_update))

        participate()
        if not self._kinds_known:

            def learn(ranks_have_sparse: Sequence[int]) -> None:
                self._learn_kinds(ranks_have_sparse, [False] * len(self._parameters))
                self._step = self._new_step()  # there may be other buckets
                participate()

            parts[self._kinds] = learn

    def compare(self, advice: str) -> Comparison | None:
        """Checks, if a comparison is due, that ranks have identical parameters after an update; else DriftError.
        Returns that comparison.
        """
        due, self.reducer.due = self.reducer.due, None
        if due is not None:
            compare_parameters(self._parameters, due, advice, self.reducer.process_set)
        return due

    def _register(self, parameters: Sequence[Any]) -> None:
        _remove(self._hooks)
        self._parameters = list(parameters)
        self._ids = [id(parameter) for parameter in parameters]
        self._plan(tuple(GradientKind(tuple(p.shape), self._adapter.spec(p).dtype) for p in parameters))
        self._kinds = Request("kinds of gradients", describe(self._layout))
        #: With how many admissions of new ranks, which do not know them, the ranks have agreed on the kinds.
        self._agreed_with: int | None = None
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(functools.partial(_on_gradient, weakref.ref(self), index))
            for index, parameter in enumerate(parameters)
        ]
        self._step = self._new_step()

    def _plan(self, layout: GradientLayout) -> None:
        self._layout = layout
        self._buckets = self.reducer.plan(layout)
        self._bucket_of = {index: bucket for bucket, indices in enumerate(self._buckets) for index in indices}

    def _divided(self, layout: GradientLayout) -> GradientLayout:
        """Returns ``layout`` as that of gradients of which each rank receives its items."""
        ranges = [self._ranges(parameter) if self._ranges else () for parameter in self._parameters]
        return tuple(each._replace(ranges=own) for each, own in zip(layout, ranges, strict=True))

    def _new_step(self) -> _Step:
        return _Step([0] * len(self._parameters), [len(indices) for indices in self._buckets])

    def gradient_computed(self, index: int, parameter: Any) -> None:
        """Records that a backward pass has accumulated the gradient of ``parameter``, the ``index``-th."""
        if self._examples() is None:
            return
        with self._lock:
            step = self._step
            step.micro_batches[index] += 1
            if step.micro_batches[index] < self.micro_batches:
                return
            if step.micro_batches[index] > self.micro_batches:
                number = step.micro_batches[index]
                raise ConfigError(
                    f"a gradient was computed {number} times since the last step, and backward_passes_per_step is "
                    f"{self.micro_batches}: this is backward pass {number} through these parameters, whichever loss it "
                    "began from (a GAN's critic is passed by its generator's, too). Count all of them up to step(): "
                    f"pass backward_passes_per_step={number}, or more if others follow, to DistributedOptimizer, or "
                    "call step() earlier. Another DistributedOptimizer of these parameters, made before and still "
                    "referred to, by its scheduler too, counts for itself: delete both."
                )
            gradient = parameter.grad
            step.complete[index] = gradient, gradient._version
            if self._overlap and self._kinds_known:
                step.missing[self._bucket_of[index]] -= 1
                while len(step.works) < len(step.missing) and not step.missing[len(step.works)]:
                    self._start_next(lambda index: step.complete[index][0])

    def _start_next(self, gradient_of: Callable[[int], Any]) -> None:
        """Starts to send the next bucket, in the queue's thread."""
        works = self._step.works
        bucket = len(works)
        own = [self._reducible(index, gradient_of(index)) for index in self._buckets[bucket]]
        communicator = self.reducer.process_set.communicator
        works.append(
            communicator.start("", self._send, bucket, own, works[-1] if works else None, self._examples() or 1)
        )

    def _send(
        self, bucket: int, gradients: Sequence[Array], previous: Work[list[Array] | None] | None, examples: int
    ) -> list[Array] | None:
        if previous is None:
            self.reducer.plan(self._layout)
        else:
            previous.wait()  # It has ended; its error is raised here, too.
        return self.reducer.send(bucket, gradients, examples=examples)

    def _finish(self, gradients: Sequence[Any], *, divided: bool = False) -> list[Array]:
        """Sends the remaining gradients and waits for all buckets; ``divided``: there is one, for ``scatter``."""
        complete = self._step.complete.items()
        changed = any(gradients[index] is not old or old._version != version for index, (old, version) in complete)
        if not self._kinds_known:
            self._agree_on_kinds(gradients)
        try:
            if divided:
                own = [self._reducible(index, gradient) for index, gradient in enumerate(gradients)]
                results = self.reducer.reduce(own, examples=self._examples() or 1, layout=self._divided(layout_of(own)))
            else:
                results = self._finish_buckets(gradients) if self._overlap else self._reduce_at_once(gradients)
        finally:
            self._step = self._new_step()
        if changed:
            raise ConfigError(
                "a gradient was changed between backward() and step(), before it was averaged over the ranks: call "
                "optimizer.synchronize() after backward(), then change gradients, then call step(). With Keras, use "
                "the optimizer's own arguments (clipnorm=…), or set CHOROS_OVERLAP=0."
            )
        return results

    def _finish_buckets(self, gradients: Sequence[Any]) -> list[Array]:
        while len(self._step.works) < len(self._buckets):
            self._start_next(gradients.__getitem__)
        results: dict[int, Array] = {}
        for indices, work in zip(self._buckets, self._step.works, strict=True):
            sums = work.wait()
            results.update(zip(indices, sums or (), strict=sums is not None))
        if sums is None:  # a rank was lost
            return self._reduce_at_once(gradients)
        return [results[index] for index in range(len(results))]

    def _reduce_at_once(self, gradients: Sequence[Any]) -> list[Array]:
        own = [self._reducible(index, gradient) for index, gradient in enumerate(gradients)]
        out = own if not self.reducer.may_repeat and are_replaceable(gradients, self._parameters) else None
        return self.reducer.reduce(own, examples=self._examples() or 1, out=out)

    def _reducible(self, index: int, gradient: Any) -> Any:
        """Returns what the reducer expects; only here are gradients copied from accelerators, after their stream."""
        adapter, kind = self._adapter, self._layout[index]
        if kind.sparse:
            if gradient is None:
                return kind.rows(0)
            sparse = gradient if gradient.is_sparse else gradient.to_sparse(1)
            indices, values = sparse._indices()[0], sparse._values()
            return SparseRows(adapter.to_host(indices), adapter.to_host(values), kind.shape)
        if gradient is None:
            gradient = self._parameters[index].new_zeros(kind[0])
        dense = adapter.to_dense(gradient, kind[0])
        return dense if self.reducer.config.device is not None else adapter.to_host(dense)

    @property
    def _kinds_known(self) -> bool:
        return not self._gathers_rows or self._agreed_with == self.reducer.process_set.admissions

    def _agree_on_kinds(self, gradients: Sequence[Any]) -> None:
        sparse = [
            kind.sparse or (gradient is not None and gradient.is_sparse and gradient.sparse_dim() == 1)
            for kind, gradient in zip(self._layout, gradients, strict=True)
        ]
        communicator = self.reducer.process_set.communicator
        communicator.atomic(lambda: self._learn_kinds(communicator.agree(self._kinds, value=int(any(sparse))), sparse))

    def _learn_kinds(self, ranks_have_sparse: Sequence[int], sparse: Sequence[bool]) -> None:
        """Completes the agreement, inside the exclusive section of its control message."""
        flags = np.array(sparse, np.uint8)
        if any(ranks_have_sparse):
            self.reducer.process_set.communicator.reduce_in_place(flags, Reduction.MAX)
            index_dtype = np.dtype(np.int64)
            pairs = zip(self._layout, flags, strict=True)
            self._plan(tuple(each._replace(index_dtype=index_dtype) if flag else each for each, flag in pairs))
        self._agreed_with = self.reducer.process_set.admissions


def are_replaceable(gradients: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether sums may be written into gradients, after the backward pass: dense ones on the host that are their
    parameters' own, of which no graph of higher derivatives and no other one needs the memory.
    """
    from choros.arrays.torch_arrays import TorchArrays

    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None or gradient is not parameter.grad or gradient.requires_grad:
            return False
    # Autograd may give parts of one tensor to several parameters.
    return TorchArrays.own_host_memory(gradients)


def _tensor_of(result: Any, parameter: Any, gradient: Any, *, on_device: bool) -> Any:
    adapter: Any = framework_adapter("torch")
    if isinstance(result, SparseRows):
        indices, values = (adapter.from_host(each, parameter) for each in (result.indices, result.values))
        return adapter.from_rows(indices, values, result.shape)
    # Results may be views of one tensor: ``data`` gives each its own version counter.
    dense = result.data if on_device else adapter.from_host(result, parameter)
    if gradient is None or not gradient.is_sparse:
        return adapter.laid_out_as(parameter, dense)
    return dense.to_sparse(gradient.sparse_dim())


def compare_parameters(
    parameters: Sequence[Any], comparison: Comparison, advice: str, process_set: ProcessSet = global_process_set
) -> None:
    """Checks that ranks have identical parameters; the arguments are those of ``check_identical``."""
    adapter = framework_adapter("torch")

    def assign(index: int, host: Array) -> None:
        parameters[index].data.copy_(adapter.from_host(host, parameters[index]))

    names = [f"parameter {index}, {tuple(parameter.shape)}" for index, parameter in enumerate(parameters)]
    check_identical(names, parameters, comparison, advice=advice, process_set=process_set, assign=assign)


def _on_gradient(exchange: weakref.ref[BackwardExchange], index: int, parameter: Any) -> None:
    """Autograd's hook. It holds a weak reference, so that the exchange is freed with its optimizer."""
    alive = exchange()
    if alive is not None:
        alive.gradient_computed(index, parameter)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
