"""The distributed optimizer: a torch optimizer whose ``step`` first reduces the ranks' gradients.

The user's object is kept: torch's hook before every step also works if a learning rate scheduler has replaced
``step``; its class becomes a subclass of the same name, which adds Horovod's methods::

    backward() ──► [hooks: buckets start]     step() ──► [pre-hook: reduce over ranks] ──► torch's step
                                         │                        ▲
                                         └─ synchronize() ────────┘ clip gradients here
"""

import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, final

import torch

from choros.comm import ProcessSet, Reduction, global_process_set, has_others, joining
from choros.data.data_loader import time_data_loaders
from choros.errors import ConfigError, NotInitializedError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.objects import allgather_object
from choros.parallel.ops import grouped_allreduce
from choros.parallel.reduce.device import device_to_reduce_on
from choros.parallel.reduce.plan import ReduceConfig, bucket_bytes, indices_of_groups
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.torch_backward import BackwardExchange
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters

T = TypeVar("T")
_ATTRIBUTE = "_choros_gradient_hook"
_NOT_AGAIN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): Horovod would "
    "reduce the gradients again, choros does not. Write: with optimizer.skip_synchronize(): optimizer.step()."
)
#: The stack level of the caller of ``step``, whose hooks torch calls.
_CALLER = 3
_ADVICE = (
    "Start all ranks from the same values: call broadcast_parameters(model.state_dict(), root_rank=0) and "
    "broadcast_optimizer_state(optimizer, root_rank=0) before training."
)
#: The distributed optimizers of this process, for ``join``.
_distributed: weakref.WeakSet[Any] = weakref.WeakSet()
_created = itertools.count()


@final
class _GradientHook:
    """Reduces one optimizer's gradients before its steps, if not ``skipping``; ``number``: those created before it."""

    shares_state = True

    def __init__(self, exchange: BackwardExchange | None) -> None:
        self.exchange = exchange
        self.process_set = None if exchange is None else exchange.reducer.config.process_set
        self.skipping = False
        self.number = next(_created)
        self._reduced = False
        self._warned = False

    @property
    def pending(self) -> bool:
        """Whether a backward pass has computed gradients that are not reduced yet."""
        return self.exchange is not None and self.exchange.pending

    def reduce(self, optimizer: Any) -> None:
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
        if not self.skipping:
            if self.pending or not self._reduced:
                self.reduce(optimizer)
            elif not self._warned:
                self._warned = True
                warnings.warn(_NOT_AGAIN, stacklevel=_CALLER)
        self._reduced = False
        return None

    def after_step(self, optimizer: Any) -> None:
        """Once, ranks compare their parameters."""
        del optimizer
        if self.exchange is not None:
            self.exchange.compare(_ADVICE)

    def abandon_step(self) -> None:
        self._reduced = False
        if self.exchange is not None:
            self.exchange.abandon()

    def set_micro_batches(self, passes: int) -> None:
        if self.exchange is not None:
            self.exchange.micro_batches = passes

    def _reducing(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reducing() -> Any:
            loss = closure()
            self.reduce(optimizer)
            self._reduced = False
            return loss

        return reducing


@final
class _ChangeHook:
    """Adasum: each rank makes a step of its own, and ranks combine the changes of their parameters.

    ::

        parameters ──step with this rank's gradients──► change ──Adasum of all ranks'──► parameters + combined change
    """

    pending = False
    skipping = False
    exchange = None
    shares_state = False

    def __init__(self, compression: Compressor, process_set: ProcessSet) -> None:
        self.process_set = process_set
        self.number = next(_created)
        self._compression = compression
        self._before: list[tuple[Any, Any]] = []

    def reduce(self, optimizer: Any) -> None:
        """Nothing: gradients are those of this rank."""

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        self._before = [(parameter, parameter.detach().clone()) for parameter in _trained(optimizer)]

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def after_step(self, optimizer: Any) -> None:
        del optimizer
        before, self._before = self._before, []
        changes = grouped_allreduce(
            [parameter.detach() - old for parameter, old in before],
            Reduction.ADASUM,
            name="parameter changes",
            compression=self._compression,
            process_set=self.process_set,
        )
        for (parameter, old), change in zip(before, changes, strict=True):
            parameter.copy_(old.add_(change))

    def abandon_step(self) -> None:
        self._before = []

    def set_micro_batches(self, passes: int) -> None:
        """Nothing: autograd sums the gradients of backward passes until the step."""


class _HorovodMethods:
    """Horovod's methods, which the subclass adds to the optimizer's own."""

    def synchronize(self) -> None:
        """Reduces all gradients now, to clip them, say; then ``step`` within ``with optimizer.skip_synchronize()``."""
        _hook_of(self).reduce(self)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which ``step`` uses gradients as they are, without reducing them."""
        hook = _hook_of(self)
        if isinstance(hook, _ChangeHook):
            raise ConfigError(
                "skip_synchronize() is not possible with op=Adasum, which combines what the step has changed: clip the "
                "gradients of this rank after backward(), and call step()."
            )
        hook.skipping = True
        try:
            yield
        finally:
            hook.skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes before each ``step``; all ranks call it, between two steps."""
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes} must be 1 or more.")
        _hook_of(self).set_micro_batches(passes)

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


def abandon_step(optimizer: Any) -> None:
    """Forgets the gradients of a step that ``optimizer``, which may be distributed, does not make."""
    if hasattr(optimizer, _ATTRIBUTE):
        _hook_of(optimizer).abandon_step()
    optimizer.zero_grad()


def _hook_of(optimizer: Any) -> _GradientHook | _ChangeHook:
    hook: _GradientHook | _ChangeHook = getattr(optimizer, _ATTRIBUTE)
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
        op: ``Average``, ``Sum`` or ``Adasum``: then each rank makes a step with its own gradients, and ranks combine
            the changes of their parameters (``comm/adasum.py``); the optimizer's state is that of the rank.
        gradient_predivide_factor: averages divide by this factor before the sum, and by the rest after it.
        num_groups: Horovod's older form of ``groups``.
        groups: gradients that are sent together: a number of groups, or lists of parameters.
        sparse_as_dense: whether sparse gradients (``torch.nn.Embedding(sparse=True)``) are reduced as dense ones, and
            sparse again after that. By default ranks gather the rows that their batches used.
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
    _check(optimizer, backward_passes_per_step, named_parameters, process_set)
    if Reduction(op) is Reduction.ADASUM:
        return _wrap(optimizer, _adasum_hook(compression, gradient_predivide_factor, process_set))
    parameters = _trained(optimizer)
    config = ReduceConfig(
        op=op,
        compressor=compression,
        predivide_factor=gradient_predivide_factor,
        groups=indices_of_groups(groups if groups is not None else num_groups, parameters, "parameter"),
        process_set=process_set,
    )
    exchange = _exchange_of(parameters, config, backward_passes_per_step, gathers_rows=not sparse_as_dense)
    return _wrap(optimizer, _GradientHook(exchange))


def _adasum_hook(compression: Compressor, predivide_factor: float, process_set: ProcessSet) -> Any:
    if predivide_factor != 1.0:
        raise ConfigError("gradient_predivide_factor splits the division of an average: it needs op=Average.")
    return _ChangeHook(compression, process_set) if has_others(process_set) else _GradientHook(None)


def _check(
    optimizer: Any,
    backward_passes_per_step: int,
    named_parameters: Iterable[tuple[str, Any]] | None,
    process_set: ProcessSet,
) -> None:
    """Raises an error if the optimizer cannot be distributed; keeps the names of its parameters."""
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
    if named_parameters is None:
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        named_parameters = [(f"parameter {i}.{j}", each) for i, group in groups for j, each in enumerate(group)]
    named_parameters = list(named_parameters)
    _check_names(named_parameters, optimizer)
    # Horovod's attribute, which scripts read.
    vars(optimizer)["_parameter_names"] = {parameter: name for name, parameter in named_parameters}


def _exchange_of(
    parameters: Sequence[Any], config: ReduceConfig, micro_batches: int, *, gathers_rows: bool
) -> BackwardExchange | None:
    """Returns what reduces the gradients of ``parameters``; ``None`` if this rank trains alone."""
    device = None
    if config.process_set.included():
        devices = [parameter.device for parameter in parameters]
        device = device_to_reduce_on(config.process_set.communicator, config.compressor, "torch", devices)
    buckets = bucket_bytes(accelerated=any(p.device.type != "cpu" for p in parameters), device=device)
    reducer = GradientReducer(replace(config, bucket_bytes=buckets, device=device))
    if not reducer.active:
        return None
    overlap = buckets is not None
    return BackwardExchange(
        reducer, parameters, overlap=overlap, micro_batches=micro_batches, gathers_rows=gathers_rows
    )


def join(device: int = -1) -> int:
    """Participates with zeros in the collectives of the other ranks until all ranks have joined (Horovod's ``join``).

    A rank calls it when it has no more batches. The steps of distributed optimizers then average over the ranks that
    still have batches; ``allreduce`` averages over all ranks, as in Horovod. At the end all ranks receive the
    parameters and the optimizer states of a rank that had the last batch; with ``op=Adasum`` the parameters only. A
    model's buffers, such as the statistics of batch normalisation, are not known to the optimizer: broadcast them with
    ``broadcast_parameters(model.state_dict(), join())``.

    Args:
        device: Horovod's; ignored, because the engine selects the device.

    Returns:
        A rank that was the last to join, the same on every rank.

    Raises:
        ConfigError: the ``step`` of a distributed optimizer is missing after a backward pass, or optimizers belong to
            different process sets.
        MismatchError: on all ranks, if another rank's collective needs all ranks, such as ``broadcast`` from this one.

    Example:
        >>> import choros.torch as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    del device
    hooks = {each: hook for each in _distributed if (hook := _hook_of(each)).process_set is not None}
    optimizers = sorted(hooks, key=lambda each: hooks[each].number)
    exchanges = [exchange for each in optimizers if (exchange := hooks[each].exchange)]
    if any(exchange.pending for exchange in exchanges):
        raise ConfigError("join() was called between backward() and step(): call step() first.")
    sets = (hook.process_set for hook in hooks.values() if hook.process_set)
    process_set = joining.process_set_of(sets, "distributed optimizers of this process")
    parts: dict[Any, Any] = {}
    for exchange in reversed(exchanges):
        exchange.participate(parts)
    communicator = process_set.communicator
    joining.join(communicator, parts)

    def receive() -> int:
        root = process_set.ranks[joining.last_to_join(communicator)]
        if communicator.last_joined:
            # Ranks collect optimizers that are no longer used at different times.
            numbers = allgather_object([hooks[each].number for each in optimizers], "join", process_set)
            everywhere = set.intersection(*map(set, numbers))
            for optimizer in (each for each in optimizers if hooks[each].number in everywhere):
                parameters = ((str(index), parameter) for index, parameter in enumerate(_trained(optimizer)))
                broadcast_parameters(parameters, root, process_set)
                if hooks[optimizer].shares_state:
                    broadcast_optimizer_state(optimizer, root, process_set=process_set)
        return root

    return communicator.atomic(receive)


def _wrap(optimizer: Any, hook: _GradientHook | _ChangeHook) -> Any:
    time_data_loaders()
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (_HorovodMethods, base), namespace)
    setattr(optimizer, _ATTRIBUTE, hook)
    optimizer.register_step_pre_hook(hook.before_step)
    optimizer.register_step_post_hook(lambda stepped, *_: hook.after_step(stepped))
    _distributed.add(optimizer)
    return optimizer


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
