"""NCCL without its bindings: whether ranks may share a card, and the id by which they find each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from choros.comm.request import Request
from choros.errors import EngineError

if TYPE_CHECKING:
    from choros.comm.communicator import Communicator

#: The first version of NCCL in which ranks can share a card, if it is configured to.
_SHARES_CARDS = (2, 30)
_SHARE_CARDS = "NCCL_MULTI_RANK_GPU_ENABLE"


def connection_error(version: Sequence[int], error: Exception | None = None) -> EngineError:
    """The error of ranks that cannot connect: because they share a card, or for NCCL's reason ``error``."""
    if error is not None and "Duplicate GPU" not in str(error):
        return EngineError(f"NCCL cannot connect: {error}")
    needed, found = (".".join(map(str, each)) for each in (_SHARES_CARDS, version))
    setting = os.environ.get(_SHARE_CARDS, "not set")
    return EngineError(
        f"several ranks have the same GPU, which NCCL lets them from version {needed} on (this is {found}) with "
        f"{_SHARE_CARDS}=1 (here {setting}). Start one rank for each GPU, as chorosrun without -np does, or "
        "install a newer NCCL."
    )


def share_cards(control: Communicator, card: str, version: Sequence[int]) -> None:
    """Configures NCCL if ranks share a card; all call it before NCCL connects, with unique names of equal length."""
    every = control.allgather(np.frombuffer(card.encode(), np.uint8)[None], name="cards")
    if len(np.unique(every, axis=0)) < control.size:
        os.environ.setdefault(_SHARE_CARDS, "1")  # read when NCCL connects its first ranks
        if tuple(version[:2]) < _SHARES_CARDS:
            raise connection_error(version)


def exchange_id(control: Communicator, make: Callable[[], bytes]) -> bytes:
    """Returns, on all members, the id that ``make`` makes on rank 0; raises an error on all of them if it cannot."""
    made, problem = b"", None
    if control.rank == 0:
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  (NCCL's, its bindings' and the loader's have nothing in common)
            problem = EngineError(f"NCCL cannot start: {error}")
    with control.exclusive():
        (length, *_) = control.agree(Request("id of NCCL"), value=len(made), problem=problem)
    sent = np.frombuffer(made, np.uint8) if made else np.zeros(length, np.uint8)
    return control.broadcast(sent, 0, name="id of NCCL").tobytes()
