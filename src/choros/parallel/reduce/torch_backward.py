"""Gradients of torch parameters, exchanged while the backward pass still runs.

Autograd calls a hook for each parameter as soon as its gradient is there, the last layers' first. Parameters are
dealt out to buckets in that order, and a bucket that is full is sent from another thread while earlier layers still
compute. Ranks fill buckets in different orders, but all of them send in the order of the plan::

    this thread      g9 g8 g7 │ g4 │ g6 g5 │ g3 g2 g1 g0 │ combine: wait ──► gradients of all ranks
                              ▼            ▼             ▼              ▲
    queue's thread     begin, send 0     send 1        send 2 ──────────┘
                       g9 g8 g7        g6 g5 g4     g3 g2 g1 g0

A parameter that the backward pass did not reach leaves its bucket open; ``combine`` brings zeros for it, and sends the
bucket and those after it. Without overlap hooks only count, and ``combine`` exchanges all gradients at once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from choros.arrays import framework_adapter
from choros.comm import Work
from choros.errors import ConfigError
from choros.parallel.reduce.exchange import Array, Layout
from choros.parallel.reduce.reducer import GradientReducer

__all__ = ["BackwardExchange"]


@dataclass
class _Step:
    """What has come since the last exchange.

    Attributes:
        passes: how many backward passes each parameter has seen.
        missing: how many gradients each bucket waits for.
        complete: by parameter, its gradient after the last pass, and the version that tells if it is changed later.
        works: the buckets that are under way.
    """

    passes: list[int]
    missing: list[int]
    complete: dict[int, tuple[Any, int]] = field(default_factory=dict)
    works: list[Work[list[Array]]] = field(default_factory=list)


@final
class BackwardExchange:
    """Combines torch parameters' gradients over the ranks, during the backward pass or after it.

    Every rank calls ``combine`` once for every ``passes`` backward passes.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        parameters: Sequence[Any],
        *,
        overlap: bool,
        passes: int = 1,
        examples: Callable[[], int | None] = lambda: 1,
    ) -> None:
        """Starts to watch ``parameters``.

        Args:
            reducer: does the exchange; in buckets, if ``overlap``.
            parameters: leaves of the autograd graph, in the same order on all ranks.
            overlap: whether full buckets are sent during the backward pass.
            passes: backward passes before each exchange; autograd adds up their gradients.
            examples: tells how many examples the gradients are of; ``None``: a backward pass at this time is for
                something else, which no other rank needs to know of.
        """
        self.reducer = reducer
        self._overlap = overlap
        self._passes = passes
        self._examples = examples
        self._adapter = framework_adapter("torch")
        self._lock = threading.Lock()  # Autograd has a thread for each device.
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self._watch(parameters)

    @property
    def layout(self) -> Layout:
        """The shapes and dtypes of the gradients."""
        return self._layout

    @property
    def pending(self) -> bool:
        """Whether a backward pass has left gradients that are not combined yet."""
        return any(self._step.passes)

    def combine(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks together.

        Args:
            parameters: those to train. If they are others than the last time, they are watched from now on, and
                what was sent for the others is dropped.
            gradients: what the backward pass has left in each one's ``grad``; ``None`` brings zeros.

        Returns:
            New tensors.

        Raises:
            ConfigError: a gradient was changed between the backward pass and this call.
            MismatchError: ranks have different parameters.
        """
        if [id(parameter) for parameter in parameters] != self._ids:
            if self._step.works:
                self._finish([parameter.grad for parameter in self._parameters])
            self._watch(parameters)
        results = self._finish(gradients)
        return [self._received(result, like) for result, like in zip(results, parameters, strict=True)]

    def _watch(self, parameters: Sequence[Any]) -> None:
        _remove(self._hooks)
        self._parameters = list(parameters)
        self._ids = [id(parameter) for parameter in parameters]
        self._layout: Layout = tuple((tuple(each.shape), self._adapter.spec(each).dtype) for each in parameters)
        self._buckets = self.reducer.plan(self._layout)
        self._bucket_of = {index: bucket for bucket, indices in enumerate(self._buckets) for index in indices}
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(functools.partial(_arrived, weakref.ref(self), index))
            for index, parameter in enumerate(parameters)
        ]
        self._step = self._new_step()

    def _new_step(self) -> _Step:
        return _Step([0] * len(self._parameters), [len(indices) for indices in self._buckets])

    def arrived(self, index: int, parameter: Any) -> None:
        """Takes notice that a backward pass has added to the gradient of ``parameter``, the ``index``-th."""
        if self._examples() is None:
            return
        with self._lock:
            step = self._step
            step.passes[index] += 1
            if step.passes[index] < self._passes:
                return
            if step.passes[index] > self._passes:
                raise ConfigError(
                    f"a gradient was computed {step.passes[index]} times since the last step, and "
                    f"backward_passes_per_step is {self._passes}: call step() after so many backward passes, or tell "
                    "DistributedOptimizer their number."
                )
            gradient = parameter.grad
            step.complete[index] = gradient, gradient._version
            if self._overlap:
                step.missing[self._bucket_of[index]] -= 1
                while len(step.works) < len(step.missing) and not step.missing[len(step.works)]:
                    self._start_next(lambda index: step.complete[index][0])

    def _start_next(self, gradient_of: Callable[[int], Any]) -> None:
        """Sends the next bucket from the queue's thread."""
        works = self._step.works
        bucket = len(works)
        brought = [self._brought(index, gradient_of(index)) for index in self._buckets[bucket]]
        communicator = self.reducer.config.process_set.communicator
        works.append(
            communicator.start(self._send, bucket, brought, works[-1] if works else None, self._examples() or 1)
        )

    def _send(
        self, bucket: int, brought: Sequence[Array], before: Work[list[Array]] | None, examples: int
    ) -> list[Array]:
        if before is None:
            self.reducer.plan(self._layout)
            self.reducer.begin(examples)
        else:
            before.wait()  # It has ended; if it failed, so does this one.
        return self.reducer.send(bucket, brought)

    def _finish(self, gradients: Sequence[Any]) -> list[Array]:
        """Exchanges what is not under way, and waits for what is."""
        complete = self._step.complete.items()
        changed = any(gradients[index] is not was or was._version != version for index, (was, version) in complete)
        try:
            if self._overlap:
                results = self._finish_buckets(gradients)
            else:
                brought = [self._brought(index, gradient) for index, gradient in enumerate(gradients)]
                results = self.reducer.reduce(brought, examples=self._examples() or 1)
        finally:
            self._step = self._new_step()
        if changed:
            raise ConfigError(
                "a gradient was changed between backward() and step(), before it was averaged over the ranks: call "
                "optimizer.synchronize() after backward(), then change gradients, then call step(). Under Keras leave "
                "it to the optimizer (clipnorm=…), or set CHOROS_OVERLAP=0."
            )
        return results

    def _finish_buckets(self, gradients: Sequence[Any]) -> list[Array]:
        while len(self._step.works) < len(self._buckets):
            self._start_next(gradients.__getitem__)
        results: dict[int, Array] = {}
        for indices, work in zip(self._buckets, self._step.works, strict=True):
            results.update(zip(indices, work.wait(), strict=True))
        return [results[index] for index in range(len(results))]

    def _brought(self, index: int, gradient: Any) -> Any:
        """A gradient as the reducer takes it: a tensor where it lies, or a host array.

        The one place where gradients leave an accelerator. That waits for the stream that computes them.
        """
        if gradient is None:
            gradient = self._parameters[index].new_zeros(self._layout[index][0])
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense if self._on_device else self._adapter.to_host(dense)

    def _received(self, result: Any, like: Any) -> Any:
        # Results may be parts of one tensor: ``data`` gives each a version of its own.
        return result.data if self._on_device else self._adapter.from_host(result, like)

    @property
    def _on_device(self) -> bool:
        return self.reducer.config.device is not None


def _arrived(exchange: weakref.ref[BackwardExchange], index: int, parameter: Any) -> None:
    """A hook that does not keep alive an exchange whose optimizer is gone."""
    alive = exchange()
    if alive is not None:
        alive.arrived(index, parameter)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
