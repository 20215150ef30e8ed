"""PyTorch's own modules and optimizers in ``strategy.run``, without Keras: it calls hooks while a replica runs.

::

    strategy.run(step)      process 0                      process 1
      module(x)             its parameters and buffers ──► received, before the module's first call
      loss.backward()
      optimizer.step()      gradients ──────── the sum over replicas ──────── gradients
                            parameters: compared ────────── parameters
    optimizer.step()        an error: gradients would be those of one replica
"""

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from choros.arrays import framework_adapter
from choros.comm import Reduction, global_process_set, has_others
from choros.errors import StrategyError
from choros.parallel.compression import Compression
from choros.parallel.identical import are_identical
from choros.parallel.ops import broadcast_arrays
from choros.parallel.random_streams import torch_numbers_of
from choros.parallel.reduce.plan import ReduceConfig, device_to_reduce_on
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.torch_backward import compare_parameters

_ADVICE = (
    "Replicas must start from the same values and change them in the same way: give the optimizer the parameters of "
    "modules that strategy.run calls, and apply the same updates on all replicas."
)

_modules: weakref.WeakSet[Any] = weakref.WeakSet()
#: Keras', which have steps of their own.
_models: weakref.WeakSet[Any] = weakref.WeakSet()
_reducers: weakref.WeakKeyDictionary[Any, GradientReducer] = weakref.WeakKeyDictionary()
#: The replicas that run.
_running: list[int] = []


def watch_model(model: Any) -> None:
    """Makes steps of torch's optimizers with a Keras model's parameters, in a ``train_step`` of its own, an error."""
    _models.add(model)
    _watch_steps()


@contextmanager
def synchronized_torch_objects(replica: int) -> Iterator[None]:
    """The block of a replica: modules start from equal values, optimizers sum gradients, random numbers are its own."""
    from torch.compiler import disable
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    _watch_steps()
    hooks = (
        register_module_forward_pre_hook(disable(_before_forward)),  # torch.compile traces neither it nor what it calls
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    )
    _running.append(replica)
    try:
        with torch_numbers_of(replica):
            yield
    finally:
        _running.remove(replica)
        for hook in hooks:
            hook.remove()


def _before_forward(module: Any, _args: tuple[Any, ...]) -> None:
    """Before the first call of a module in a replica: all processes receive its values from process 0."""
    if module in _modules or _is_of_keras(module):
        return
    _modules.update(module.modules())
    adapter = framework_adapter("torch")
    tensors = {name: tensor for name, tensor in module.state_dict().items() if hasattr(tensor, "copy_")}
    hosts = [adapter.to_host(tensor) for tensor in tensors.values()]
    if are_identical(hosts):
        return
    received = broadcast_arrays(hosts, 0, names=list(tensors))
    for tensor, host in zip(tensors.values(), received, strict=True):
        tensor.copy_(adapter.from_host(host, tensor))  # state_dict() detaches: autograd does not see this


@functools.cache
def _watch_steps() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_check_place)


def _check_place(optimizer: Any, *_: Any) -> None:
    """Refuses steps outside of replicas, with parameters that replicas train."""
    if _running or hasattr(optimizer, "synchronize") or not has_others(global_process_set):
        return
    trained = {id(parameter) for module in _modules for parameter in module.parameters(recurse=False)}
    trained |= {id(parameter) for model in _models for parameter in model.parameters()}
    if any(id(parameter) in trained for parameter in _trained(optimizer)):
        raise StrategyError(
            f"{type(optimizer).__name__}.step() was called outside of strategy.run, where gradients are those of this "
            "process's replica alone: call it in the function that strategy.run runs, or pass the optimizer to "
            "choros.torch.DistributedOptimizer. In the train_step of a Keras model, use an optimizer of Keras."
        )


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replaces the gradients of an optimizer by their sums over the replicas."""
    if hasattr(optimizer, "synchronize"):  # choros.torch.DistributedOptimizer reduces them itself
        return
    if len(args) > 1 or kwargs.get("closure") is not None:
        raise StrategyError(
            f"{type(optimizer).__name__}.step(closure) was called in a replica, where gradients are summed before the "
            "step: compute them before it, and call step() without a closure."
        )
    adapter = framework_adapter("torch")
    parameters = _trained(optimizer)
    if optimizer not in _reducers:
        communicator = global_process_set.communicator
        devices = [parameter.device for parameter in parameters]
        device = device_to_reduce_on(communicator, Compression.none, "torch", devices)
        _reducers[optimizer] = GradientReducer(ReduceConfig(op=Reduction.SUM, device=device, compared_step=1))
    reducer = _reducers[optimizer]
    on_device = reducer.config.device is not None
    dense = [
        adapter.zeros_like(each) if each.grad is None else adapter.to_dense(each.grad, tuple(each.shape))
        for each in parameters
    ]
    # Which have a gradient: torch leaves out the others, also what decays or moves without one. Which a sparse one.
    have = [each.grad is not None for each in parameters]
    are_sparse = [each.grad is not None and each.grad.is_sparse for each in parameters]
    kinds = np.array([have, are_sparse], np.float32)
    gradients = (
        [*dense, adapter.from_host(kinds, parameters[0])] if on_device else [*map(adapter.to_host, dense), kinds]
    )
    *reduced, sums = reducer.reduce(gradients, examples=1)
    if not all(have) or any(are_sparse):
        kinds = adapter.to_host(sums.data) if on_device else sums
    for parameter, result, has, is_sparse in zip(parameters, reduced, *kinds, strict=True):
        own = result.data if on_device else adapter.from_host(result, parameter)
        parameter.grad = None if not has else own.to_sparse(1) if is_sparse else own


def _after_step(optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """After the first step of an optimizer, and from time to time, checks that replicas have identical parameters."""
    reducer = _reducers.get(optimizer)
    if reducer is not None and reducer.due is not None:
        due, reducer.due = reducer.due, None
        compare_parameters(_trained(optimizer), due, _ADVICE)


def _is_of_keras(module: Any) -> bool:
    """Whether this is a Keras layer or model, which its strategy's scope synchronises, as on the other frameworks."""
    return "keras" in sys.modules and isinstance(module, sys.modules["keras"].Layer)


def _trained(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
