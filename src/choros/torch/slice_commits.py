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
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.comm import Request
from choros.parallel.reduce.slices import Holders, check_slices
from choros.torch.division import State, decoded, encoded, on_host, parameters_of, state_of_all
from choros.torch.sliced_state import ParameterSlices, SavedSlices, settings_of


def save(optimizer: Any, slices: ParameterSlices) -> SavedSlices:
    """Returns this rank's slice, and a copy of another one's; all ranks call it between two steps.

    Raises:
        ConfigError: the state has values that ranks cannot send one another.
    """
    slices.settle(optimizer)
    communicator, shift = slices.process_set.communicator, slices.holders.shift
    own = {index: slices.part(parameter) for index, parameter in enumerate(parameters_of(optimizer))}
    settings, others = settings_of(optimizer), state_of_all(optimizer)
    message = encoded(own) if shift else b""
    if shift and not slices.is_checked:
        decoded(message), decoded(encoded((settings, others)))  # better an error now than when they are needed
        slices.is_checked = True
    request = Request("copies of optimizer state", name=slices.name)

    def collective() -> NDArray[np.uint8]:
        check_slices(len(slices.holders.members), communicator)
        lengths = communicator.agree(request, value=len(message))
        sent, received = [0] * communicator.size, [0] * communicator.size
        source = (slices.number - shift) % communicator.size
        sent[(slices.number + shift) % communicator.size] = len(message)
        received[source] = lengths[source]
        return communicator.alltoallv_bytes(np.frombuffer(message, np.uint8), sent, received)

    received = communicator.atomic(collective)
    used = copy.deepcopy(on_host((settings, own, others)))
    return SavedSlices(slices, slices.holders, slices.number, slices.divided, used, received)


def restore(optimizer: Any, saved: SavedSlices) -> None:
    """Gives this rank its slice as it was at a ``save``."""
    slices = saved.slices
    slices.holders, slices.number, slices.divided = saved.holders, saved.number, saved.divided
    slices.use(optimizer, *copy.deepcopy(saved.used))


def cut_anew(optimizer: Any, slices: ParameterSlices, root: int, saved: Any) -> None:
    """Cuts the slices for the ranks that there are now, if these have changed since; all ranks call it between two
    steps, of which one that has joined receives its slice. Where ranks were lost, copies are what was ``saved``, if it
    is of these slices. If ``root`` has the state of one process, that is to come.

    Raises:
        PeerLostError: on all ranks, if a slice and its copy were lost.
    """
    slices.restore()
    if not isinstance(saved, SavedSlices) or saved.slices is not slices:
        saved = None
    communicator, parameters = slices.process_set.communicator, parameters_of(optimizer)
    request = Request("slices of optimizer state")  # one that has joined may call them otherwise

    def hear() -> tuple[list[int], bytes]:
        is_root = communicator.rank == root
        message = _description(optimizer, slices, parameters, saved.holders.shift if saved else 0) if is_root else b""
        values = communicator.agree(request, value=2 * len(message) + slices.is_whole)
        counts = [value // 2 for value in values]
        return values, communicator.gather_bytes(np.frombuffer(message, np.uint8), counts).tobytes()

    values, message = communicator.atomic(hear)
    heard = decoded(message)
    slices.call(heard["name"])
    before, now = (dict(zip(parameters, heard[ranges], strict=True)) for ranges in ("before", "now"))
    if values[root] % 2:
        slices.divide_anew(now)
        slices.is_whole = True
        return
    lacking = {member for member, value in zip(communicator.launched, values, strict=True) if value % 2}
    holders = Holders(tuple(heard["members"]), heard["shift"])
    if holders.members == communicator.launched and not lacking:
        return
    holders, divided = holders.without(lacking), slices.divider.divided(before)
    copies = {} if slices.is_whole or saved is None or not saved.copy.size else decoded(saved.copy.tobytes())
    request, parts = Request("state of a parameter", name=slices.name), {}

    def gathered(index: int, parameter: Any) -> State:
        def part(number: int) -> State:
            return slices.part(parameter) if number == slices.number else copies.get(index, {})

        def gather() -> list[bytes]:
            communicator.agree(request, value=index)
            return slices.gather_messages(holders, part)

        return divided[parameter].joined(parameter, communicator.atomic(gather))

    for index, (parameter, each) in enumerate(slices.divider.divided(now).items()):
        parts[index] = each.cut(gathered(index, parameter), parameter, communicator.rank)
    slices.divide_anew(now)
    slices.use(optimizer, heard["settings"], parts, heard["others"])


def _description(optimizer: Any, slices: ParameterSlices, parameters: Sequence[Any], shift: int) -> bytes:
    """What others need to know: one that has joined may have frozen other parameters."""
    slices.divide(optimizer)
    now = slices.divider.evenly(parameters, slices.process_set.communicator.size)
    return encoded(
        {
            "name": slices.name,
            "members": list(slices.holders.members),
            "shift": shift,
            "before": list(map(slices.ranges_of, parameters)),
            "now": [now[parameter] for parameter in parameters],
            "settings": settings_of(optimizer),
            "others": state_of_all(optimizer),
        }
    )
