"""The distributed optimizer: a torch optimizer whose ``step`` first reduces the ranks' gradients.

The user's optimizer object is kept. A hook that torch runs before every step reduces gradients, also if a learning
rate scheduler has already replaced the method ``step``; the object's class becomes a subclass of the same name, which
adds Horovod's methods::

    backward() ──► [hooks: buckets start]     step() ──► [pre-hook: reduce over ranks] ──► torch's step
                                         │                        ▲
                                         └─ synchronize() ────────┘ clip gradients here
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import torch

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError, NotInitializedError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.device import device_to_reduce_on
from choros.parallel.reduce.reducer import GradientReducer, ReduceConfig, bucket_bytes, indices_of_groups
from choros.parallel.reduce.torch_backward import BackwardExchange
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["DistributedOptimizer", "join"]

T = TypeVar("T")
_ATTRIBUTE = "_choros_gradient_hook"
_ADVICE = (
    "Start all ranks from the same values: call broadcast_parameters(model.state_dict(), root_rank=0) and "
    "broadcast_optimizer_state(optimizer, root_rank=0) before training."
)
#: The distributed optimizers of this process, for ``join``.
_distributed: weakref.WeakSet[Any] = weakref.WeakSet()


@final
class _GradientHook:
    """Reduces the gradients of one distributed optimizer before its steps.

    Attributes:
        exchange: reduces its parameters' gradients; ``None`` if there are no other ranks.
        skipping: whether steps use gradients as they are, without reducing them.
    """

    def __init__(self, exchange: BackwardExchange | None) -> None:
        self.exchange = exchange
        self.skipping = False
        self._reduced = False

    @property
    def pending(self) -> bool:
        """Whether a backward pass has computed gradients that are not reduced yet."""
        return self.exchange is not None and self.exchange.pending

    def reduce(self, optimizer: Any) -> None:
        """Replaces ``grad`` of all parameters by the gradients reduced over the ranks."""
        if self.exchange is None:
            return
        parameters = _trained(optimizer)
        reduced = self.exchange.reduce(parameters, [parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = gradient
        self._reduced = True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's pre-hook of ``step``, whose arguments it may replace: by a closure that also reduces gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None and not self.skipping:
            return (args[0], self._reducing(optimizer, closure)), {k: v for k, v in kwargs.items() if k != "closure"}
        if not self.skipping and (self.pending or not self._reduced):
            self.reduce(optimizer)
        self._reduced = False
        return None

    def after_step(self) -> None:
        """Once, ranks compare their parameters."""
        if self.exchange is not None:
            self.exchange.compare(_ADVICE)

    def _reducing(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reducing() -> Any:
            loss = closure()
            self.reduce(optimizer)
            self._reduced = False
            return loss

        return reducing


class _HorovodMethods:
    """Horovod's methods, which the subclass adds to the optimizer's own."""

    def synchronize(self) -> None:
        """Reduces the gradients of all parameters now, so that the next ``step`` need not.

        For code that needs the reduced gradients before the step, such as clipping::

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        _hook_of(self).reduce(self)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which ``step`` uses gradients as they are, without reducing them."""
        hook = _hook_of(self)
        hook.skipping = True
        try:
            yield
        finally:
            hook.skipping = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's method; an error between a backward pass and its step."""
        if _hook_of(self).pending:
            raise ConfigError(
                "zero_grad() was called between backward() and step(), before gradients were reduced: "
                "call it after step(), or before backward()."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Copies and pickles are plain optimizers of the original class."""
        optimizer: Any = self
        return _new, (type(self).__mro__[2],), optimizer.__getstate__()


def _new(kind: type[T]) -> T:
    return kind.__new__(kind)


def _hook_of(optimizer: Any) -> _GradientHook:
    hook: _GradientHook = getattr(optimizer, _ATTRIBUTE)
    return hook


def _trained(optimizer: Any) -> list[Any]:
    """Returns the parameters that are not frozen now."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Reduction.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes a torch optimizer average gradients over all ranks before it applies them.

    All ranks have the same weight. A missing gradient on a rank counts as zeros, as in Horovod; after the reduction
    every rank has it. The optimizer gets the methods ``synchronize()`` and ``skip_synchronize()``.

    Args:
        optimizer: any ``torch.optim.Optimizer`` except LBFGS. It is modified in place.
        named_parameters: ``model.named_parameters()``, to check that it contains all parameters of the optimizer.
        compression: the compression of gradients, such as ``Compression.fp16``.
        backward_passes_per_step: the number of backward passes (micro-batches) before each ``step``. Autograd sums
            their gradients: divide the loss by this number for their average.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: averages divide by this factor before the sum, and by the rest after it.
        num_groups: Horovod's older form of ``groups``.
        groups: gradients that are sent together: a number of groups, or lists of parameters.
        sparse_as_dense: Horovod's; ignored, because sparse gradients are always converted to dense ones.
        process_set: the ranks that train together; other ranks train independently.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument is invalid, or the optimizer is already distributed.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size()))
        >>> isinstance(optimizer, torch.optim.SGD)
        True
    """
    del sparse_as_dense
    if process_set.included() is None:
        raise NotInitializedError("DistributedOptimizer()")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"DistributedOptimizer takes a torch.optim.Optimizer, not a {type(optimizer).__name__}: create one, such "
            "as torch.optim.Adam(model.parameters()), and pass it."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS cannot be distributed, because ranks may compute different numbers of gradients: use another one."
        )
    if hasattr(optimizer, _ATTRIBUTE):
        raise ConfigError("this optimizer is already distributed: pass it to DistributedOptimizer only once.")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more.")
    parameters = _trained(optimizer)
    if named_parameters is not None:
        _check_names(list(named_parameters), optimizer)
    device = None
    if process_set.included():
        devices = [parameter.device for parameter in parameters]
        device = device_to_reduce_on(process_set.communicator, compression, "torch", devices)
    buckets = bucket_bytes(accelerated=any(p.device.type != "cpu" for p in parameters), device=device)
    config = ReduceConfig(
        op=op,
        compressor=compression,
        predivide_factor=gradient_predivide_factor,
        groups=indices_of_groups(groups if groups is not None else num_groups, parameters, "parameter"),
        bucket_bytes=buckets,
        device=device,
        process_set=process_set,
    )
    reducer = GradientReducer(config)
    exchange = None
    if reducer.active:
        exchange = BackwardExchange(
            reducer, parameters, overlap=buckets is not None, micro_batches=backward_passes_per_step
        )
    _wrap(optimizer, _GradientHook(exchange))
    return optimizer


def join(device: int = -1) -> int:
    """Participates with zeros in the steps of the other ranks until no rank has more batches (Horovod's ``join``).

    A rank calls it when it has no more batches. Later steps average over the ranks that still have batches. At the end
    all ranks receive the parameters and the optimizer state of a rank that had the last batch. A model's buffers, such
    as the statistics of batch normalisation, are not known to the optimizer: broadcast them with
    ``broadcast_parameters(model.state_dict(), join())``.

    Args:
        device: Horovod's; ignored, because the engine selects the device.

    Returns:
        A rank that had a batch in the last step, the same on every rank.

    Raises:
        ConfigError: the process does not have exactly one distributed optimizer, or its ``step`` is missing after a
            backward pass.
    """
    del device
    if len(_distributed) != 1:
        raise ConfigError(f"join() needs exactly one distributed optimizer; this process has {len(_distributed)}.")
    (optimizer,) = _distributed
    hook = _hook_of(optimizer)
    if hook.exchange is None:
        return global_process_set.communicator.rank
    if hook.pending:
        raise ConfigError("join() was called between backward() and step(): call step() first.")
    reducer = hook.exchange.reducer
    process_set = reducer.config.process_set
    last = reducer.join(hook.exchange.layout)
    if last is None:
        return process_set.ranks[0]
    root = process_set.ranks[last]
    parameters = ((str(index), parameter) for index, parameter in enumerate(_trained(optimizer)))
    broadcast_parameters(parameters, root, process_set)
    broadcast_optimizer_state(optimizer, root, process_set)
    return root


def _wrap(optimizer: Any, hook: _GradientHook) -> None:
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (_HorovodMethods, base), namespace)
    setattr(optimizer, _ATTRIBUTE, hook)
    optimizer.register_step_pre_hook(hook.before_step)
    optimizer.register_step_post_hook(lambda *_: hook.after_step())
    _distributed.add(optimizer)


def _check_names(named_parameters: Sequence[Any], optimizer: Any) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named_parameters):
        raise ConfigError("named_parameters must be pairs (name, parameter): pass model.named_parameters().")
    duplicates = [name for name, count in Counter(name for name, _ in named_parameters).items() if count > 1]
    if duplicates:
        raise ConfigError(f"named_parameters contains these names more than once: {', '.join(duplicates)}.")
    named = {id(parameter) for _, parameter in named_parameters}
    own = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    unnamed = [tuple(parameter.shape) for parameter in own if id(parameter) not in named]
    if unnamed:
        raise ConfigError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes "
            f"{', '.join(map(str, unnamed[:3]))}{', …' if len(unnamed) > 3 else ''}: pass model.named_parameters()."
        )
