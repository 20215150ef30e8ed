"""What reduces a Keras optimizer's gradients over the ranks: the same in both programming models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArraySpec, HostFunction, framework_adapter
from choros.comm import ProcessSet, ReduceOp, global_process_set
from choros.errors import ConfigError
from choros.parallel.compression import Compressor
from choros.parallel.reduce.device import device_to_reduce_on
from choros.parallel.reduce.reducer import GradientReducer, ReduceConfig, bucket_bytes
from choros.training.combiner import Combiner, Update, passes_of
from choros.training.device import accelerated
from choros.training.variables import broadcast_variables

__all__ = ["Synchronizer", "accumulation_steps", "placed", "synchronizer_for"]

Array = NDArray[Any]


@final
class Synchronizer(Combiner):
    """What a distributed optimizer knows of the other ranks; one an optimizer.

    Attributes:
        reducer: does the exchange.
        examples: how many examples the batch now being trained on has, told by the model's training step;
            ``None`` if nobody tells, then ranks weigh alike.
        in_epoch: batches may still come this epoch.
    """

    def __init__(self, config: ReduceConfig, *, scale_local_gradients: bool) -> None:
        self.reducer = GradientReducer(config)
        self.examples: Any = None
        self.in_epoch = False
        self._of_all_ranks = False
        self._overlap: Any = None
        self._scale_local = scale_local_gradients
        self._local: list[Any] = []

    def add_local(self, variable: Any) -> None:
        """Keeps ``variable``'s gradient out of the exchange."""
        self._local.append(variable)

    def is_local(self, variable: Any) -> bool:
        """Whether ``variable``'s gradient stays on its rank."""
        return any(variable is local for local in self._local)

    @property
    def is_alike(self) -> bool:
        """Whether all ranks have all gradients in common."""
        return self.reducer.config.process_set is global_process_set and not self._local

    @contextmanager
    def batch_of(self, examples: Any, *, of_all_ranks: bool = False) -> Iterator[None]:
        """The block in which gradients of a batch of so many examples are applied.

        Args:
            examples: how many.
            of_all_ranks: the batch is the global one, so that its gradients need no exchange.
        """
        self.examples, self._of_all_ranks = examples, of_all_ranks
        try:
            yield
        finally:
            self.examples, self._of_all_ranks = None, False

    @property
    def synchronizer(self) -> Synchronizer:
        """This one: it combines in ``fit`` as elsewhere."""
        return self

    @property
    def has_state(self) -> bool:
        """Every rank makes the same updates."""
        return True

    @property
    def shares_state(self) -> bool:
        """Every rank makes the same updates."""
        return True

    def apply(self, optimizer: Any, update: Update, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Updates with what is combined."""
        update(self.combine(gradients, variables, passes_of(optimizer)))

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any], passes: Any) -> list[Any]:
        """The average of the ranks' gradients, or their sum, as the reducer is told."""
        config = self.reducer.config
        gradients = list(gradients)
        if self._of_all_ranks or not self.reducer.active:
            factor = 1 if config.average_steps else config.steps
            if self._of_all_ranks and config.op is ReduceOp.SUM:
                factor *= config.process_set.communicator.size
            return gradients if factor == 1 else [None if g is None else g * factor for g in gradients]
        shared: list[int] = []
        local: list[int] = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None:
                (local if self.is_local(variable) else shared).append(index)
        combined = self._exchange([gradients[i] for i in shared], [variables[i] for i in shared], passes)
        for index, gradient in zip(shared, combined, strict=True):
            gradients[index] = gradient
        if self._scale_local:
            for index in local:
                gradients[index] = gradients[index] / config.process_set.communicator.size
        return gradients

    def _exchange(self, gradients: list[Any], variables: list[Any], passes: Any) -> list[Any]:
        examples = 1 if self.examples is None else self.examples
        outputs = [ArraySpec(tuple(v.shape), _dtype(g)) for v, g in zip(variables, gradients, strict=True)]
        config = self.reducer.config
        if keras.backend.backend() == "torch" and (config.bucket_bytes is not None or config.device is not None):
            return self._exchange_tensors(gradients, variables, (int(passes) + 1) % config.steps == 0)
        if config.bucket_bytes is not None:
            return self._exchange_buckets(gradients, outputs, examples)
        steps = config.steps

        def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
            done, count, *parts = hosts
            exchange = (int(done) + 1) % steps == 0
            return self.reducer.reduce(parts, examples=int(count), exchange=exchange)

        return _host_call(on_host, (passes, examples), gradients, outputs)

    def _exchange_tensors(self, gradients: list[Any], variables: list[Any], exchange: bool) -> list[Any]:
        """On torch: during the backward pass, or without a way over the host, or both."""
        from choros.training.torch_overlap import TorchOverlap

        if self.reducer.config.bucket_bytes is None:
            examples = 1 if self.examples is None else int(self.examples)
            return self.reducer.reduce(gradients, examples=examples, exchange=exchange)
        if self._overlap is None:
            self._overlap = TorchOverlap(self.reducer, lambda: self.examples)
        return list(self._overlap.combine(gradients, variables))

    def _exchange_buckets(self, gradients: list[Any], outputs: list[ArraySpec], examples: Any) -> list[Any]:
        """A call a bucket: a compiled step can make it as soon as those gradients are there.

        The calls have side effects, so the frameworks keep them in this order, on every rank.
        """
        buckets = self.reducer.plan(tuple((output.shape, output.dtype) for output in outputs))  # type: ignore[misc]
        combined = list(gradients)
        for bucket, indices in enumerate(buckets):

            def on_host(hosts: Sequence[Array], bucket: int = bucket) -> Sequence[Array]:
                count, *parts = hosts
                if bucket == 0:
                    self.reducer.begin(int(count))
                return self.reducer.send(bucket, parts)

            part = [outputs[index] for index in indices]
            results = _host_call(on_host, (examples,), [gradients[index] for index in indices], part)
            for index, result in zip(indices, results, strict=True):
                combined[index] = result
        return combined

    def follow(self, variables: Sequence[Any], on_update: Callable[[list[Array]], None] | None = None) -> int | None:
        """``GradientReducer.join`` with the gradients of ``variables``."""
        return self.reducer.join(tuple((tuple(v.shape), _dtype(v)) for v in variables), on_update)

    def join(self, optimizer: Any) -> None:
        """Goes along with the ranks that still have batches this epoch, until none has.

        Ranks that were done early then take over the weights and the optimizer state of one that was not,
        so that all end the epoch alike, learning rate and all.
        """
        if not self.reducer.active:
            return
        variables = optimizer._trainable_variables
        shared = [variable for variable in variables if not self.is_local(variable)]
        last = self.follow(shared)
        if last is not None:
            process_set = self.reducer.config.process_set
            broadcast_variables([*shared, *optimizer.variables], process_set.ranks[last], process_set)


def _host_call(function: HostFunction, numbers: Sequence[Any], arrays: Sequence[Any], outputs: Any) -> list[Any]:
    adapter = framework_adapter(keras.backend.backend())
    inputs = [keras.ops.convert_to_tensor(number, "int32") for number in numbers]
    return adapter.host_call(function, [*inputs, *arrays], outputs)


def synchronizer_for(optimizer: Any) -> Synchronizer:
    """What averages the gradients of ``optimizer`` over the examples of all ranks, as Keras itself would accumulate."""
    base = getattr(optimizer, "inner_optimizer", optimizer)
    config = ReduceConfig(steps=accumulation_steps(base, 1))
    return Synchronizer(placed(config), scale_local_gradients=True)


def placed(config: ReduceConfig) -> ReduceConfig:
    """``config`` with where and in what portions gradients are combined, as the framework and its device want it."""
    device = _device_to_reduce_on(config.process_set, config.compressor)
    portions = bucket_bytes(accelerated=accelerated(), device=device) if config.steps == 1 else None
    return dataclasses.replace(config, device=device, bucket_bytes=portions)


def _device_to_reduce_on(process_set: ProcessSet, compression: Compressor) -> Any:
    """Where gradients are summed without a way over the host; ``None`` elsewhere than on torch."""
    if keras.backend.backend() != "torch" or not process_set.included():
        return None
    import torch
    from keras.src.backend.torch.core import get_device

    device = torch.empty(0, device=get_device()).device
    return device_to_reduce_on(process_set.communicator, compression, [device])


def accumulation_steps(optimizer: Any, backward_passes: int) -> int:
    """How many passes the optimizer accumulates; makes Keras do it if Horovod's argument asks."""
    own = optimizer.gradient_accumulation_steps
    if backward_passes == 1:
        return int(own or 1)
    if own is not None:
        raise ConfigError(
            f"backward_passes_per_step={backward_passes} and the optimizer's own gradient_accumulation_steps={own} "
            "are the same thing: use one of them."
        )
    if optimizer.built:
        raise ConfigError(
            "backward_passes_per_step needs an optimizer that has not been used: it adds accumulators, which are "
            "made with the optimizer's other state."
        )
    optimizer.gradient_accumulation_steps = backward_passes
    return backward_passes


def _dtype(tensor: Any) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(keras.backend.standardize_dtype(tensor.dtype))
    return dtype
