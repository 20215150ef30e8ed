"""The distributed optimizer: a torch optimizer whose ``step`` first combines the ranks' gradients.

The user's optimizer object is kept. A hook that torch runs before every step exchanges gradients, also where a
learning rate scheduler has replaced the method ``step`` before; the object's class becomes a subclass of the same
name, for Horovod's further methods::

    backward() ──► [hooks: buckets start]     step() ──► [pre-hook: combine over ranks] ──► torch's step
                                         │                        ▲
                                         └─ synchronize() ────────┘ clip here, if at all
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import torch

from choros.comm import ProcessSet, ReduceOp, global_process_set
from choros.errors import ConfigError, NotInitializedError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.device import device_to_reduce_on
from choros.parallel.reduce.reducer import GradientReducer, ReduceConfig, bucket_bytes, indices_of_groups
from choros.parallel.reduce.torch_backward import BackwardExchange
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["DistributedOptimizer", "join"]

T = TypeVar("T")
_ATTRIBUTE = "_choros_synchronizer"
#: The distributed optimizers of this process, for ``join``.
_distributed: weakref.WeakSet[Any] = weakref.WeakSet()


@final
class _Synchronizer:
    """What a distributed optimizer knows of the other ranks; one an optimizer.

    Attributes:
        exchange: of its parameters' gradients; ``None`` if there is nobody to exchange with.
        skipping: steps are made from gradients as they are.
    """

    def __init__(self, exchange: BackwardExchange | None) -> None:
        self.exchange = exchange
        self.skipping = False
        self._synchronized = False

    @property
    def pending(self) -> bool:
        """Whether a backward pass has left gradients that are not combined yet."""
        return self.exchange is not None and self.exchange.pending

    def synchronize(self, optimizer: Any) -> None:
        """Puts the gradients of all ranks into ``grad``."""
        if self.exchange is None:
            return
        parameters = _trained(optimizer)
        combined = self.exchange.combine(parameters, [parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, combined, strict=True):
            parameter.grad = gradient
        self._synchronized = True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's hook; it may give ``step`` other arguments: a closure that exchanges what it has computed."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None and not self.skipping:
            return (args[0], self._exchanging(optimizer, closure)), {k: v for k, v in kwargs.items() if k != "closure"}
        if not self.skipping and (self.pending or not self._synchronized):
            self.synchronize(optimizer)
        self._synchronized = False
        return None

    def _exchanging(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        def exchanging() -> Any:
            loss = closure()
            self.synchronize(optimizer)
            self._synchronized = False
            return loss

        return exchanging


class _Distributed:
    """What the replaced class adds to the optimizer's own methods."""

    def synchronize(self) -> None:
        """Waits until ``grad`` of every parameter holds the gradient of all ranks; ``step`` then need not.

        For what must see that gradient before the step, such as clipping::

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        _synchronizer_of(self).synchronize(self)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """The block in which ``step`` takes gradients as they are."""
        synchronizer = _synchronizer_of(self)
        synchronizer.skipping = True
        try:
            yield
        finally:
            synchronizer.skipping = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's; an error while gradients of a backward pass wait for their step."""
        if _synchronizer_of(self).pending:
            raise ConfigError(
                "zero_grad() was called between backward() and step(): the gradients are on their way to other ranks. "
                "Call it after step(), or before backward()."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """A copy is the plain optimizer that this one was."""
        optimizer: Any = self
        return _blank, (type(self).__mro__[2],), optimizer.__getstate__()


def _blank(kind: type[T]) -> T:
    return kind.__new__(kind)


def _synchronizer_of(optimizer: Any) -> _Synchronizer:
    synchronizer: _Synchronizer = getattr(optimizer, _ATTRIBUTE)
    return synchronizer


def _trained(optimizer: Any) -> list[Any]:
    """The parameters that are not frozen at present."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes a torch optimizer average gradients over all ranks before it applies them.

    Ranks weigh alike. A parameter that has no gradient on a rank counts as zeros there, as in Horovod, and has one
    after the exchange. It gets the methods ``synchronize()`` and ``skip_synchronize()``.

    Args:
        optimizer: any ``torch.optim.Optimizer`` but LBFGS. It is changed in place.
        named_parameters: ``model.named_parameters()``, to check that the optimizer's parameters are all among them.
        compression: how gradients travel, such as ``Compression.fp16``.
        backward_passes_per_step: backward passes before each ``step``. Autograd adds up their gradients: divide the
            loss by their number for an average.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: averages divide by this much before the sum and by the rest after it.
        num_groups: Horovod's older form of ``groups``.
        groups: gradients that travel together: a number of groups, or lists of parameters.
        sparse_as_dense: Horovod's; sparse gradients are always made dense.
        process_set: the ranks that train together; others go on alone.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument has a value that cannot be meant, or the optimizer is distributed already.

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
        raise ConfigError("LBFGS decides by the loss of its own rank how often to compute gradients: use another one.")
    if hasattr(optimizer, _ATTRIBUTE):
        raise ConfigError("this optimizer is distributed already: wrap it once.")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more.")
    parameters = _trained(optimizer)
    if named_parameters is not None:
        _check_names(list(named_parameters), optimizer)
    device = None
    if process_set.included():
        devices = [parameter.device for parameter in parameters]
        device = device_to_reduce_on(process_set.communicator, compression, devices)
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
        exchange = BackwardExchange(reducer, parameters, overlap=buckets is not None, passes=backward_passes_per_step)
    _wrap(optimizer, _Synchronizer(exchange))
    return optimizer


def join(device: int = -1) -> int:
    """Goes along with the ranks that still have batches, until none has (Horovod's ``join``).

    A rank calls it when it has no more batches. Steps of the others then average over the ranks that take part. In the
    end all ranks take over the parameters and the optimizer state of one that went on to the end. A model's buffers,
    such as the statistics of batch normalisation, the optimizer does not know:
    ``broadcast_parameters(model.state_dict(), join())``.

    Args:
        device: Horovod's; the engine decides where it works.

    Returns:
        A rank that took part in the last step, the same on every rank.

    Raises:
        ConfigError: there is not exactly one distributed optimizer, or it has not stepped after a backward pass.
    """
    del device
    if len(_distributed) != 1:
        raise ConfigError(f"join() goes along with one distributed optimizer; this process has {len(_distributed)}.")
    (optimizer,) = _distributed
    synchronizer = _synchronizer_of(optimizer)
    if synchronizer.exchange is None:
        return global_process_set.communicator.rank
    if synchronizer.pending:
        raise ConfigError("join() was called between backward() and step(): call step() first.")
    reducer = synchronizer.exchange.reducer
    process_set = reducer.config.process_set
    last = reducer.join(synchronizer.exchange.layout)
    if last is None:
        return process_set.ranks[0]
    root = process_set.ranks[last]
    parameters = ((str(index), parameter) for index, parameter in enumerate(_trained(optimizer)))
    broadcast_parameters(parameters, root, process_set)
    broadcast_optimizer_state(optimizer, root, process_set)
    return root


def _wrap(optimizer: Any, synchronizer: _Synchronizer) -> None:
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (_Distributed, base), namespace)
    setattr(optimizer, _ATTRIBUTE, synchronizer)
    optimizer.register_step_pre_hook(synchronizer.before_step)
    _distributed.add(optimizer)


def _check_names(named_parameters: Sequence[Any], optimizer: Any) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named_parameters):
        raise ConfigError("named_parameters takes pairs (name, parameter), such as model.named_parameters().")
    twice = [name for name, count in Counter(name for name, _ in named_parameters).items() if count > 1]
    if twice:
        raise ConfigError(f"named_parameters has these names more than once: {', '.join(twice)}.")
    named = {id(parameter) for _, parameter in named_parameters}
    own = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    unnamed = [tuple(parameter.shape) for parameter in own if id(parameter) not in named]
    if unnamed:
        raise ConfigError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes "
            f"{', '.join(map(str, unnamed[:3]))}{', …' if len(unnamed) > 3 else ''}: name all of them, or none."
        )
