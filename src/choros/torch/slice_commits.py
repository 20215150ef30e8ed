"""Commits of an optimizer's state of which each rank has a slice, in memory: for a function of ``hvd.elastic.run``,
which goes on from its last one. With each commit a rank gives another one a copy of its slice::

                    rank 0             rank 1             rank 2
    save            slice 0, copy 2    slice 1, copy 0    slice 2, copy 1
    rank 1 is lost
    restore         slice 0                               slice 2
    cut_anew        ── 0 from rank 0, 1 (the copy) and 2 from rank 2 ──     one parameter at a time
                    slice 0 of 2                          slice 1 of 2
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.comm import Request
from choros.parallel.reduce.slices import Holders
from choros.torch.division import DividedParameter, State, parameters_of, state_of_all
from choros.torch.messages import decoded, encoded, on_host
from choros.torch.sliced_state import ParameterSlices, SavedSlices, settings_of


def save(optimizer: Any, slices: ParameterSlices) -> None:
    """Saves this rank's slice, and a copy of another one's; all ranks call it between two steps.

    Raises:
        ConfigError: the state has values that ranks cannot send one another.
    """
    slices.settle(optimizer)
    communicator, shift = slices.process_set.communicator, slices.holders.shift
    own = {index: slices.part(parameter) for index, parameter in enumerate(parameters_of(optimizer))}
    message = encoded(own) if shift else b""
    if slices.saved is None and message:
        decoded(message)  # better an error now than when it is needed
    request = Request("copies of optimizer state", name=slices.name)

    def collective() -> NDArray[np.uint8]:
        slices.without_copies.senders(communicator.launched)  # all are there
        lengths = communicator.agree(request, value=len(message))
        sent, received = [0] * communicator.size, [0] * communicator.size
        source = (slices.number - shift) % communicator.size
        sent[(slices.number + shift) % communicator.size] = len(message)
        received[source] = lengths[source]
        return communicator.alltoallv_bytes(np.frombuffer(message, np.uint8), sent, received)

    received = communicator.atomic(collective)
    kept = copy.deepcopy(on_host({"state": own, "others": state_of_all(optimizer)}))
    settings = copy.deepcopy(settings_of(optimizer))
    slices.saved = SavedSlices(slices.holders, slices.number, slices.divided, settings, kept, received)


def restore(optimizer: Any, slices: ParameterSlices) -> None:
    """Gives this rank its slice as it was at the last ``save``, if there was one."""
    if (saved := slices.saved) is not None:
        slices.holders, slices.number, slices.divided = saved.holders, saved.number, saved.divided
        slices.use(optimizer, copy.deepcopy(saved.settings), **copy.deepcopy(saved.own))


def cut_anew(optimizer: Any, slices: ParameterSlices) -> None:
    """Cuts the slices for the ranks that there are now, if these have changed since; all ranks call it between two
    steps, of which one that has joined receives its slice. If a rank was lost, the others have called ``restore``.

    Raises:
        PeerLostError: on all ranks, if a slice and its copy were lost.
    """
    slices.restore()
    communicator, parameters = slices.process_set.communicator, parameters_of(optimizer)
    request = Request("slices of optimizer state", name=slices.name)

    def hear() -> tuple[list[int], bytes]:
        message = b"" if slices.is_whole else _description(optimizer, slices, parameters)
        lengths = communicator.agree(request, value=len(message))
        first = next((rank for rank, length in enumerate(lengths) if length), 0)
        counts = [length if rank == first else 0 for rank, length in enumerate(lengths)]
        own = message if communicator.rank == first else b""
        return lengths, communicator.gather_bytes(np.frombuffer(own, np.uint8), counts).tobytes()

    lengths, message = communicator.atomic(hear)
    if not message:  # each has the state of one process
        slices.divide_anew(slices.divider.evenly(parameters, communicator.size))
        return
    heard = decoded(message)
    lacking = {member for member, length in zip(communicator.launched, lengths, strict=True) if not length}
    holders = Holders(tuple(heard["members"]), heard["shift"])
    if holders.members == communicator.launched and not lacking:
        return
    before, now = (dict(zip(parameters, heard[ranges], strict=True)) for ranges in ("before", "now"))
    parts = _gathered(slices, holders.without(lacking), slices.divider.divided(before), slices.divider.divided(now))
    slices.divide_anew(now)
    slices.use(optimizer, heard["settings"], parts, heard["others"])


def _description(optimizer: Any, slices: ParameterSlices, parameters: Sequence[Any]) -> bytes:
    """What a rank that has joined needs to know, which may have frozen other parameters."""
    slices.divide(optimizer)
    now = slices.divider.evenly(parameters, slices.process_set.communicator.size)
    return encoded(
        {
            "members": list(slices.holders.members),
            "shift": slices.holders.shift,
            "before": list(map(slices.ranges_of, parameters)),
            "now": [now[parameter] for parameter in parameters],
            "settings": settings_of(optimizer),
            "others": state_of_all(optimizer),
        }
    )


def _gathered(
    slices: ParameterSlices, holders: Holders, before: dict[Any, DividedParameter], now: dict[Any, DividedParameter]
) -> dict[int, State]:
    """Returns this rank's part of the state of each parameter, by its number."""
    communicator = slices.process_set.communicator
    copies = {} if slices.is_whole or slices.saved is None else slices.saved.decoded_copy()
    request, parts = Request("state of a parameter", name=slices.name), {}
    for index, parameter in enumerate(before):

        def part(number: int, index: int = index, parameter: Any = parameter) -> State:
            return slices.part(parameter) if number == slices.number else copies.get(index, {})

        def gather(index: int = index, part: Callable[[int], State] = part) -> list[bytes]:
            communicator.agree(request, value=index)
            return slices.gather_messages(holders, part)

        whole = before[parameter].joined(parameter, communicator.atomic(gather))
        parts[index] = now[parameter].cut(whole, parameter, communicator.rank)
    return parts
