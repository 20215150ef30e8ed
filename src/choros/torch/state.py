"""Broadcast of model parameters and optimizer state."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from choros.arrays import framework_adapter
from choros.comm import ProcessSet, global_process_set
from choros.errors import ConfigError
from choros.parallel.objects import broadcast_object
from choros.parallel.ops import broadcast_arrays
from choros.torch import slice_commits
from choros.torch.division import on_host, parameters_of, state_of_all
from choros.torch.sliced_state import ParameterSlices, settings_of, slices_of, use_settings

#: Optimizers whose state of zeros, and no steps, is that before the first step. SGD's is not, with dampening.
_STARTS_FROM_ZEROS = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the tensors of ``root_rank`` into those of every rank.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``; the same on every rank,
            a mapping in any order. Values of a state dict that are not tensors are not changed.
        root_rank: a global rank.
        process_set: the participating ranks.

    Raises:
        ConfigError: ``params`` is none of these.
        MismatchError: ranks have different tensors; the text shows the first difference.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    """
    adapter = framework_adapter("torch")
    named = _named(params)
    tensors = [(name, tensor) for name, tensor in named if torch.is_tensor(tensor)]  # two models have equal names
    if not tensors and any(isinstance(value, Mapping) for _, value in named):
        raise ConfigError("broadcast_parameters takes the state_dict() of one model: call it for each of them.")
    hosts = [adapter.to_host(tensor) for _, tensor in tensors]
    received = broadcast_arrays(hosts, root_rank, names=[name for name, _ in tensors], process_set=process_set)
    with torch.no_grad():
        for (_, tensor), host in zip(tensors, received, strict=True):
            tensor.copy_(adapter.from_host(host, tensor))


def _named(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if torch.is_tensor(params) or isinstance(params, (str, torch.nn.Module)) or not isinstance(params, Iterable):
        raise ConfigError(
            f"broadcast_parameters takes model.state_dict() or model.parameters(), not a {type(params).__name__}."
        )
    return [each if isinstance(each, tuple) else (f"parameter {index}", each) for index, each in enumerate(params)]


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the state and settings of ``root_rank``'s optimizer, including its learning rate, to every rank's.

    Slices of its state stay where they are; in an elastic job they are cut for the ranks that there are now.

    If the root's optimizer is unused, state that most of torch's optimizers create in the first step is created, such
    that the next step is still the first. Parameters of an unused optimizer that have no gradient get one of zeros.

    Args:
        optimizer: an optimizer of the same parameters on every rank; it may be unused.
        root_rank: a global rank.
        model: Horovod's; ignored, because sparse parameters have the same state as others.
        process_set: the participating ranks.

    Raises:
        ConfigError: the optimizer is an LBFGS, whose state is of one rank.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_optimizer_state(torch.optim.Adam(torch.nn.Linear(2, 1).parameters()), root_rank=0)
    """
    del model
    broadcast_optimizer(optimizer, root_rank, process_set)


def broadcast_optimizer(optimizer: Any, root_rank: int, process_set: ProcessSet, saved: Any = None) -> None:
    """``broadcast_optimizer_state``; where ranks were lost, their slices are those that this one has ``saved``."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("the state of torch.optim.LBFGS cannot be broadcast: it is that of its own rank's steps.")
    communicator, slices = process_set.communicator, slices_of(optimizer)
    is_root = communicator.ranks[communicator.rank] == root_rank
    if slices is not None and communicator.elastic and not communicator.is_new:
        slice_commits.cut_anew(optimizer, slices, communicator.ranks.index(root_rank), saved)
    if not optimizer.state and (slices is None or slices.is_whole):
        _create_gradients(optimizer)
        if is_root:
            _create_state(optimizer)
    if communicator.size == 1 and not communicator.elastic:
        return
    if slices is not None:
        _broadcast_slices(optimizer, slices, root_rank, process_set, is_root=is_root)
        return
    state = broadcast_object(
        on_host(optimizer.state_dict()) if is_root else None, root_rank, "optimizer state", process_set
    )
    if not is_root:
        optimizer.load_state_dict(state)
        _keep_dtypes(optimizer, state["state"])


def _keep_dtypes(optimizer: Any, sent: Mapping[int, Any]) -> None:
    """Gives the state that ``optimizer`` has loaded the root's dtypes: torch has given it those of its parameters, but
    NAdam's ``mu_product``, say, is of float32, and the next step would be another one than the root's.
    """
    for index, parameter in enumerate(parameters_of(optimizer)):
        for key, value in sent.get(index, {}).items():
            loaded = optimizer.state[parameter][key]
            if torch.is_tensor(value) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _broadcast_slices(
    optimizer: Any, slices: ParameterSlices, root_rank: int, process_set: ProcessSet, *, is_root: bool
) -> None:
    """``broadcast_optimizer_state`` if each rank is to have a slice of the state. That of one process, which the root
    has created or loaded, is sent one parameter at a time; slices stay where they are.
    """
    parameters = parameters_of(optimizer)

    def sent(value: Any) -> Any:
        return broadcast_object(on_host(value) if is_root else None, root_rank, "optimizer state", process_set)

    having = [index for index, each in enumerate(parameters) if slices.is_whole and each in optimizer.state]
    settings, is_whole, having, others = sent(
        (settings_of(optimizer), slices.is_whole, having, state_of_all(optimizer))
    )
    parts = {index: slices.cut(sent(optimizer.state.get(parameters[index])), parameters[index]) for index in having}
    if not is_root and is_whole:
        slices.use(optimizer, settings, parts, others)
    elif not is_root:
        use_settings(optimizer, settings)
    slices.settle(optimizer)


def _create_gradients(optimizer: Any) -> None:
    """Gives parameters without a gradient one of zeros, as Horovod does: scripts read it before their first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else zeros


def _create_state(optimizer: Any) -> None:
    """Creates the state of an unused optimizer, by a step of a copy with gradients of zeros."""
    if not isinstance(optimizer, _STARTS_FROM_ZEROS) or any(group.get("dampening") for group in optimizer.param_groups):
        return
    probe = copy.deepcopy(optimizer)
    for group in probe.param_groups:
        group["weight_decay"] = 0
        for parameter in group["params"]:
            parameter.grad = None
    _create_gradients(probe)
    probe.step()
    created = probe.state_dict()["state"]
    for state in created.values():
        if "step" in state:
            state["step"] = state["step"] * 0
    optimizer.load_state_dict({**optimizer.state_dict(), "state": created})
