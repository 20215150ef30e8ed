"""Reduction of torch gradients during the backward pass.

Autograd calls a hook for each parameter as soon as its gradient is computed, the last layers' first. Parameters are
grouped into buckets in that order, and a full bucket is sent from another thread while earlier layers still compute.
Ranks may fill buckets in different orders, but all of them send buckets in the order of the plan::

    this thread      g9 g8 g7 │ g4 │ g6 g5 │ g3 g2 g1 g0 │ combine: wait ──► reduced gradients
                              ▼            ▼             ▼              ▲
    queue's thread     begin, send 0     send 1        send 2 ──────────┘
                       g9 g8 g7        g6 g5 g4     g3 g2 g1 g0

A parameter that the backward pass did not reach leaves its bucket incomplete; ``combine`` uses zeros for it, and sends
that bucket and those after it. Without overlap hooks only count, and ``combine`` reduces all gradients at once.
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
from choros.parallel.identical import check_identical
from choros.parallel.reduce.exchange import Array, Layout
from choros.parallel.reduce.reducer import GradientReducer

__all__ = ["BackwardExchange"]


@dataclass
class _Step:
    """The gradients computed since the last reduction.

    Attributes:
        micro_batches: for each parameter, the number of backward passes that computed its gradient.
        missing: for each bucket, the number of gradients it waits for.
        complete: by parameter, its gradient after the last micro-batch, and its version, which detects later changes.
        works: the buckets that are being sent.
    """

    micro_batches: list[int]
    missing: list[int]
    complete: dict[int, tuple[Any, int]] = field(default_factory=dict)
    works: list[Work[list[Array]]] = field(default_factory=list)


@final
class BackwardExchange:
    """Reduces torch parameters' gradients over the ranks, during the backward pass or after it.

    Every rank calls ``combine`` once for every ``micro_batches`` backward passes.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        parameters: Sequence[Any],
        *,
        overlap: bool,
        micro_batches: int = 1,
        examples: Callable[[], int | None] = lambda: 1,
    ) -> None:
        """Registers hooks on ``parameters``.

        Args:
            reducer: reduces the gradients; in buckets, with ``overlap``.
            parameters: leaves of the autograd graph, in the same order on all ranks.
            overlap: whether full buckets are sent during the backward pass.
            micro_batches: backward passes before each reduction; autograd sums their gradients.
            examples: returns the number of examples of the gradients; ``None`` if the backward pass is not part of
                a training step: then it is ignored.
        """
        self.reducer = reducer
        self._overlap = overlap
        self._micro_batches = micro_batches
        self._examples = examples
        self._adapter = framework_adapter("torch")
        self._lock = threading.Lock()  # Autograd runs hooks in one thread per device.
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self._register(parameters)

    @property
    def layout(self) -> Layout:
        """The shapes and dtypes of the gradients."""
        return self._layout

    @property
    def pending(self) -> bool:
        """Whether a backward pass has computed gradients that are not reduced yet."""
        return any(self._step.micro_batches)

    def reduce(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients reduced over all ranks.

        Args:
            parameters: those to train. If they differ from those of the last call, hooks are moved to them, and
                buckets that were sent for the previous ones are discarded.
            gradients: the ``grad`` of each parameter after the backward pass; ``None`` counts as zeros.

        Returns:
            New tensors.

        Raises:
            ConfigError: a gradient was changed between the backward pass and this call.
            MismatchError: ranks have different parameters.
        """
        if [id(parameter) for parameter in parameters] != self._ids:
            if self._step.works:
                self._finish([parameter.grad for parameter in self._parameters])
            self._register(parameters)
        results = self._finish(gradients)
        return [self._to_tensor(result, like) for result, like in zip(results, parameters, strict=True)]

    def compare(self, advice: str) -> None:
        """Checks that ranks have identical parameters, after the update that follows the reducer's compared step.

        Args:
            advice: what the user can do if they differ.

        Raises:
            DriftError: they differ.
        """
        if not self.reducer.compares:
            return
        self.reducer.compares = False
        names = [f"parameter {index}, {tuple(p.shape)}" for index, p in enumerate(self._parameters)]
        hosts = [self._adapter.to_host(parameter) for parameter in self._parameters]
        config = self.reducer.config
        when = f"after step {config.compared_step}"
        check_identical(names, hosts, when=when, advice=advice, process_set=config.process_set)

    def _register(self, parameters: Sequence[Any]) -> None:
        _remove(self._hooks)
        self._parameters = list(parameters)
        self._ids = [id(parameter) for parameter in parameters]
        self._layout: Layout = tuple((tuple(p.shape), self._adapter.spec(p).dtype) for p in parameters)
        self._buckets = self.reducer.plan(self._layout)
        self._bucket_of = {index: bucket for bucket, indices in enumerate(self._buckets) for index in indices}
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(functools.partial(_on_gradient, weakref.ref(self), index))
            for index, parameter in enumerate(parameters)
        ]
        self._step = self._new_step()

    def _new_step(self) -> _Step:
        return _Step([0] * len(self._parameters), [len(indices) for indices in self._buckets])

    def gradient_computed(self, index: int, parameter: Any) -> None:
        """Records that a backward pass has accumulated the gradient of ``parameter``, the ``index``-th."""
        if self._examples() is None:
            return
        with self._lock:
            step = self._step
            step.micro_batches[index] += 1
            if step.micro_batches[index] < self._micro_batches:
                return
            if step.micro_batches[index] > self._micro_batches:
                raise ConfigError(
                    f"a gradient was computed {step.micro_batches[index]} times since the last step, and "
                    f"backward_passes_per_step is {self._micro_batches}: call step() after that many backward passes, "
                    "or pass their number to DistributedOptimizer."
                )
            gradient = parameter.grad
            step.complete[index] = gradient, gradient._version
            if self._overlap:
                step.missing[self._bucket_of[index]] -= 1
                while len(step.works) < len(step.missing) and not step.missing[len(step.works)]:
                    self._start_next(lambda index: step.complete[index][0])

    def _start_next(self, gradient_of: Callable[[int], Any]) -> None:
        """Starts to send the next bucket, in the queue's thread."""
        works = self._step.works
        bucket = len(works)
        own = [self._own_gradient(index, gradient_of(index)) for index in self._buckets[bucket]]
        communicator = self.reducer.config.process_set.communicator
        works.append(communicator.start(self._send, bucket, own, works[-1] if works else None, self._examples() or 1))

    def _send(
        self, bucket: int, gradients: Sequence[Array], previous: Work[list[Array]] | None, examples: int
    ) -> list[Array]:
        if previous is None:
            self.reducer.plan(self._layout)
            self.reducer.begin(examples)
        else:
            previous.wait()  # It has ended; its error is raised here, too.
        return self.reducer.send(bucket, gradients)

    def _finish(self, gradients: Sequence[Any]) -> list[Array]:
        """Sends the remaining gradients and waits for all buckets."""
        complete = self._step.complete.items()
        changed = any(gradients[index] is not old or old._version != version for index, (old, version) in complete)
        try:
            if self._overlap:
                results = self._finish_buckets(gradients)
            else:
                own = [self._own_gradient(index, gradient) for index, gradient in enumerate(gradients)]
                results = self.reducer.reduce(own, examples=self._examples() or 1)
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
            results.update(zip(indices, work.wait(), strict=True))
        return [results[index] for index in range(len(results))]

    def _own_gradient(self, index: int, gradient: Any) -> Any:
        """Returns the gradient as the reducer expects it: a dense tensor on its device, or a host array.

        Gradients are copied from an accelerator only here. The copy waits for the stream that computes them.
        """
        if gradient is None:
            gradient = self._parameters[index].new_zeros(self._layout[index][0])
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense if self._on_device else self._adapter.to_host(dense)

    def _to_tensor(self, result: Any, like: Any) -> Any:
        # Results may be views of one tensor: ``data`` gives each its own version counter.
        return result.data if self._on_device else self._adapter.from_host(result, like)

    @property
    def _on_device(self) -> bool:
        return self.reducer.config.device is not None


def _on_gradient(exchange: weakref.ref[BackwardExchange], index: int, parameter: Any) -> None:
    """Autograd's hook. It holds a weak reference, so that the exchange is freed with its optimizer."""
    alive = exchange()
    if alive is not None:
        alive.gradient_computed(index, parameter)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
