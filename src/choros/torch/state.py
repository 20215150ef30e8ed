"""Broadcast of model parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from choros.arrays import framework_adapter
from choros.comm import ProcessSet, global_process_set
from choros.parallel.objects import broadcast_object
from choros.parallel.ops import broadcast_arrays

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the tensors of ``root_rank`` into those of every rank.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``, with the same names on every rank. Values of a
            state dict that are not tensors are not changed.
        root_rank: a global rank.
        process_set: the participating ranks.

    Raises:
        MismatchError: ranks have different tensors; the text shows the first difference.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    """
    adapter = framework_adapter("torch")
    named = dict(params.items() if isinstance(params, Mapping) else params)
    tensors = {name: tensor for name, tensor in named.items() if torch.is_tensor(tensor)}
    hosts = [adapter.to_host(tensor) for tensor in tensors.values()]
    received = broadcast_arrays(hosts, root_rank, names=list(tensors), process_set=process_set)
    with torch.no_grad():
        for tensor, host in zip(tensors.values(), received, strict=True):
            tensor.copy_(adapter.from_host(host, tensor))


def broadcast_optimizer_state(optimizer: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copies the state and settings of ``root_rank``'s optimizer, including its learning rate, to every rank's.

    Args:
        optimizer: an optimizer of the same parameters on every rank; it may be unused.
        root_rank: a global rank.
        process_set: the participating ranks.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_optimizer_state(torch.optim.Adam(torch.nn.Linear(2, 1).parameters()), root_rank=0)
    """
    communicator = process_set.communicator
    if communicator.size == 1:
        return
    is_root = communicator.ranks[communicator.rank] == root_rank
    state = broadcast_object(
        _on_cpu(optimizer.state_dict()) if is_root else None, root_rank, "optimizer state", process_set
    )
    if not is_root:
        optimizer.load_state_dict(state)


def _on_cpu(state: Any) -> Any:
    """Returns ``state`` with its tensors in host memory, because other ranks use other devices."""
    if torch.is_tensor(state):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_on_cpu(value) for value in state)
    return state
