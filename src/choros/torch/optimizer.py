"""The distributed optimizer: a torch optimizer whose ``step`` first reduces the ranks' gradients.

The user's object is kept: torch's hook before every step also works if a learning rate scheduler has replaced
``step``; its class becomes a subclass of the same name, which adds Horovod's methods::

    backward() ──► [hooks: buckets start]     step() ──► [pre-hook: reduce over ranks] ──► torch's step
                                         │                        ▲
                                         └─ synchronize() ────────┘ clip gradients here
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from choros.comm import ProcessSet, Reduction, global_process_set, has_others, joining
from choros.data.data_loader import time_data_loaders
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.objects import allgather_object
from choros.parallel.reduce.plan import (
    ReduceConfig,
    bucket_bytes,
    check_passes,
    check_predivision,
    device_to_reduce_on,
    indices_of_groups,
)
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.slices import check_process_set
from choros.parallel.reduce.torch_backward import BackwardExchange
from choros.settings import current
from choros.torch.division import trained
from choros.torch.sliced_state import slice_state, slices_of, whole_state
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters
from choros.torch.step_hooks import ChangeHook, GradientHook, SlicedStep, is_within_step
from choros.training.replaced import derived

T = TypeVar("T")
_ATTRIBUTE = "_choros_gradient_hook"
#: The distributed optimizers of this process, for ``join``.
_distributed: weakref.WeakSet[Any] = weakref.WeakSet()


class _HorovodMethods:
    """Horovod's methods, which the subclass adds to the optimizer's own."""

    def synchronize(self) -> None:
        """Reduces all gradients now, to clip them, say; then ``step`` within ``with optimizer.skip_synchronize()``."""
        _hook_of(self).reduce(self)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which ``step`` uses gradients as they are, without reducing them."""
        hook = _hook_of(self)
        if isinstance(hook, ChangeHook):
            raise ConfigError(
                "skip_synchronize() is not possible with op=Adasum, which combines what the step has changed: clip the "
                "gradients of this rank after backward(), and call step()."
            )
        hook.skipping = True
        try:
            yield
        finally:
            hook.skipping = False

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes before each ``step``."""
        exchange = _hook_of(self).exchange
        return 1 if exchange is None else exchange.micro_batches

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes before each ``step``; all ranks call it, between two steps."""
        check_passes(passes)
        if (exchange := _hook_of(self).exchange) is not None:
            exchange.micro_batches = passes

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Torch's method; the hook gets the whole gradients of all ranks, and ``step`` uses what it makes of them."""
        handle = super().register_step_pre_hook(hook)  # type: ignore[misc]
        _hook_of(self).begin_after_all(self)
        return handle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's method; backward passes before it do not count, such as that of a GAN's generator for its critic."""
        _hook_of(self).drop_gradients()
        if slices := slices_of(self):
            slices.restore()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self) -> Any:
        """Torch's method, with the state of one process: a call of this rank suffices."""
        with whole_state(self):
            return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Torch's method, for the state of one process."""
        slices = slices_of(self)
        if slices is not None:
            slices.restore()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        if slices is not None:
            slices.loaded(self)

    def add_param_group(self, param_group: Any) -> None:
        """Torch's method."""
        slices = slices_of(self)
        if slices is not None:
            slices.restore()
        super().add_param_group(param_group)  # type: ignore[misc]
        if slices is not None:
            slices.divide(self)

    def __reduce__(self) -> Any:
        """Copies and pickles are plain optimizers of the original class, with the state of one process."""
        optimizer: Any = self
        with whole_state(self):
            return _new, (type(self).__mro__[2],), optimizer.__getstate__()


def _new(kind: type[T]) -> T:
    return kind.__new__(kind)


def abandon_step(optimizer: Any) -> None:
    """Forgets the gradients of a step that ``optimizer``, which may be distributed, does not make."""
    if hasattr(optimizer, _ATTRIBUTE):
        _hook_of(optimizer).abandon_step()
    optimizer.zero_grad()


def is_amid_update(optimizer: Any) -> bool:
    """Whether ``optimizer``, which may be distributed, has had some of the backward passes of a step, and not all."""
    exchange = _hook_of(optimizer).exchange if hasattr(optimizer, _ATTRIBUTE) else None
    return exchange is not None and 0 < exchange.passes < exchange.micro_batches


def _hook_of(optimizer: Any) -> GradientHook:
    hook: GradientHook = getattr(optimizer, _ATTRIBUTE)
    return hook


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
    shard_state: bool | None = None,
) -> Any:
    """Makes a torch optimizer average gradients over all ranks before it applies them.

    All ranks have the same weight. A missing gradient counts as zeros, as in Horovod, and every rank has it afterwards.
    The optimizer gets the methods ``synchronize()`` and ``skip_synchronize()``.

    Args:
        optimizer: any ``torch.optim.Optimizer`` except LBFGS. It is modified in place.
        named_parameters: ``model.named_parameters()``, to check that it contains all parameters of the optimizer.
        compression: the compression of gradients, such as ``Compression.fp16``.
        backward_passes_per_step: how many backward passes precede a ``step``; they are summed: divide the loss by it.
        op: ``Average``, ``Sum`` or ``Adasum``: then each rank makes a step of its own, with a state of its own, and
            ranks combine the changes of their parameters (``comm/adasum.py``).
        gradient_predivide_factor: averages divide by this factor before the sum, and by the rest after it.
        num_groups: Horovod's older form of ``groups``.
        groups: gradients that are sent together: a number of groups, or lists of parameters.
        sparse_as_dense: whether sparse gradients are reduced as dense ones. By default ranks gather the rows in them.
        process_set: the ranks that train together; other ranks train independently.
        shard_state: whether each rank has a slice of the optimizer's state only, and updates the weights in it: see
            docs/shard-state.md (``None``: ``chorosrun --shard-state``). After ``step``, gradients are this rank's.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument is invalid, the optimizer is already distributed, or its state cannot be divided.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size()))
    """
    if shard_state is None:
        shard_state = current().shard_state and Reduction(op) is not Reduction.ADASUM
    _check(optimizer, backward_passes_per_step, named_parameters, process_set, op if shard_state else None)
    if Reduction(op) is Reduction.ADASUM:
        return _wrap(optimizer, _adasum_hook(compression, gradient_predivide_factor, process_set))
    config = ReduceConfig(
        op=op,
        compressor=compression,
        predivide_factor=gradient_predivide_factor,
        groups=indices_of_groups(groups if groups is not None else num_groups, trained(optimizer), "parameter"),
        process_set=process_set,
    )
    hook = _hook(optimizer, config, backward_passes_per_step, gathers_rows=not sparse_as_dense, shards=shard_state)
    return _wrap(optimizer, hook)


def _adasum_hook(compression: Compressor, predivide_factor: float, process_set: ProcessSet) -> GradientHook:
    check_predivision(predivide_factor, Reduction.ADASUM)
    return ChangeHook(compression, process_set) if has_others(process_set) else GradientHook(None)


def _check(
    optimizer: Any,
    backward_passes_per_step: int,
    named_parameters: Iterable[tuple[str, Any]] | None,
    process_set: ProcessSet,
    sharded_op: Reduction | None,
) -> None:
    """Raises an error if the optimizer cannot be distributed; keeps the names of its parameters. ``sharded_op``: the
    reduction if ranks are to have slices of its state.
    """
    process_set.check_registered("DistributedOptimizer()")
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
    check_passes(backward_passes_per_step)
    if sharded_op is not None and Reduction(sharded_op) is Reduction.ADASUM:
        raise ConfigError(
            "shard_state=True and op=Adasum: each rank makes a whole step of its own with Adasum, for which it needs "
            "all of the optimizer's state: pass only one of them."
        )
    if sharded_op is not None:
        check_process_set(process_set)
    if named_parameters is None:
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        named_parameters = [(f"parameter {i}.{j}", each) for i, group in groups for j, each in enumerate(group)]
    named_parameters = list(named_parameters)
    _check_names(named_parameters, optimizer)
    # Horovod's attribute, which scripts read.
    vars(optimizer)["_parameter_names"] = {parameter: name for name, parameter in named_parameters}


def _hook(
    optimizer: Any, config: ReduceConfig, micro_batches: int, *, gathers_rows: bool, shards: bool
) -> GradientHook:
    """Returns what reduces the optimizer's gradients; it does nothing if this rank trains alone."""
    parameters, process_set, device = trained(optimizer), config.process_set, None
    if process_set.included():
        devices = [parameter.device for parameter in parameters]
        device = device_to_reduce_on(process_set.communicator, config.compressor, "torch", devices)
    buckets = bucket_bytes(accelerated=any(p.device.type != "cpu" for p in parameters), device=device)
    if shards:  # what is reduced during the backward pass is received whole
        buckets = None
    slices = slice_state(optimizer, process_set) if shards and has_others(process_set) else None
    name, ranges = ("", None) if slices is None else (slices.name, slices.ranges_of)
    reducer = GradientReducer(replace(config, bucket_bytes=buckets, device=device), name)
    if slices is not None:
        slices.reducer = reducer
    if not reducer.active:
        return GradientHook(None)
    exchange = BackwardExchange(
        reducer, parameters, micro_batches=micro_batches, gathers_rows=gathers_rows, ranges=ranges
    )
    return GradientHook(exchange, None if slices is None else SlicedStep(slices, exchange))


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
        ConfigError: the ``step`` of a distributed optimizer is missing after its backward passes, or optimizers belong
            to different process sets.
        MismatchError: on all ranks, if another rank's collective needs all ranks, such as ``broadcast`` from this one.

    Example:
        >>> import choros.torch as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    del device
    hooks = {each: hook for each in _distributed if (hook := _hook_of(each)).takes_steps}
    optimizers = sorted(hooks, key=lambda each: hooks[each].number)
    exchanges = [exchange for each in optimizers if (exchange := hooks[each].exchange)]
    if any(exchange.passes >= exchange.micro_batches for exchange in exchanges):
        raise ConfigError(
            "join() was called between backward() and step(): call step() first, or zero_grad() if another loss has "
            "computed these gradients."
        )
    sets = (hook.process_set for hook in hooks.values() if hook.process_set)
    process_set = joining.process_set_of(sets, "distributed optimizers of this process")
    parts: dict[Any, Any] = {}
    for each in reversed(optimizers):
        hooks[each].participate(each, parts)
    communicator = process_set.communicator
    joining.join(communicator, parts)

    def receive() -> int:
        root = process_set.ranks[joining.last_to_join(communicator)]
        if communicator.last_joined:
            # Ranks collect optimizers that are no longer used at different times.
            numbers = allgather_object([hooks[each].number for each in optimizers], "join", process_set)
            everywhere = set.intersection(*map(set, numbers))
            for optimizer in (each for each in optimizers if hooks[each].number in everywhere):
                parameters = ((str(index), parameter) for index, parameter in enumerate(trained(optimizer)))
                broadcast_parameters(parameters, root, process_set)
                if hooks[optimizer].shares_state:
                    broadcast_optimizer_state(optimizer, root, process_set=process_set)
        return root

    return communicator.atomic(receive)


def _wrap(optimizer: Any, hook: GradientHook) -> Any:
    time_data_loaders()
    optimizer.__class__ = derived(type(optimizer), _HorovodMethods)
    setattr(optimizer, _ATTRIBUTE, hook)

    def before(stepped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if is_within_step(stepped) else hook.before_step(stepped, args, kwargs)

    def after(stepped: Any, *_: Any) -> None:
        if not is_within_step(stepped):
            hook.after_step(stepped)

    def begin(stepped: Any, *_: Any) -> None:
        if not is_within_step(stepped):
            hook.before_update(stepped)

    # Torch's own, not that of the derived class: between these two are the user's.
    register = partial(torch.optim.Optimizer.register_step_pre_hook, optimizer)
    hook.handles = register(before), register(begin)
    handle = optimizer.register_step_post_hook(after)
    # Hooks that were there before, such as moving averages of the weights, are called when all have these.
    vars(optimizer)["_optimizer_step_post_hooks"].move_to_end(handle.id, last=False)
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
