"""NCCL's connection of the members' GPUs, with or without a card for each rank."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch  # noqa: TID253  (imported where tensors of torch are at hand)
import torch.distributed as dist  # noqa: TID253

from choros.comm.communicator import Communicator
from choros.comm.engines.process_groups import FOREVER
from choros.errors import EngineError

__all__ = ["nccl_group"]

#: The first version of NCCL in which ranks can share a card, if it is configured to.
_NCCL_SHARES_CARDS = (2, 30)
_SHARE_CARDS = "NCCL_MULTI_RANK_GPU_ENABLE"


def nccl_group(store: dist.Store, control: Communicator, device: torch.device) -> Any:
    """A group of the members' GPUs, of which ``device`` is this rank's; all members must call it.

    Raises:
        EngineError: NCCL cannot connect them.
    """
    card = str(torch.cuda.get_device_properties(device).uuid).encode()
    cards = control.allgather(np.frombuffer(card, np.uint8)[None], name="cards")
    if len(np.unique(cards, axis=0)) < control.size:
        os.environ.setdefault(_SHARE_CARDS, "1")  # read when NCCL connects its first ranks
        if _nccl_version()[:2] < _NCCL_SHARES_CARDS:
            raise EngineError(_shared_card())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    try:
        group = dist.ProcessGroupNCCL(store, control.rank, control.size, options)
        # NCCL connects ranks in their first collective: run one here, to raise its errors here.
        group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        text = str(error)
        raise EngineError(_shared_card() if "Duplicate GPU" in text else f"NCCL cannot connect: {text}") from error
    return group


def _nccl_version() -> tuple[int, ...]:
    """The version of the loaded library; ``torch.cuda.nccl.version()`` is the one PyTorch was built with."""
    return tuple(dist.ProcessGroupNCCL.get_runtime_nccl_version())


def _shared_card() -> str:
    needed, found = (".".join(map(str, version)) for version in (_NCCL_SHARES_CARDS, _nccl_version()))
    setting = os.environ.get(_SHARE_CARDS, "not set")
    return (
        f"several ranks have the same GPU, which NCCL lets them from version {needed} on (this is {found}) with "
        f"{_SHARE_CARDS}=1 (here {setting}). Start one rank for each GPU, as chorosrun without -np does, or install a "
        "newer NCCL."
    )
