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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.comm import Request
from choros.parallel.reduce.slices import Holders, check_slices
from choros.torch.division import DividedParameter, State, parameters_of, state_of_all
from choros.torch.messages import decoded, encoded, on_host
from choros.torch.sliced_state import ParameterSlices, SavedSlices, settings_of, slices_of


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
    kept_settings, kept_own, kept_others = copy.deepcopy(on_host((settings, own, others)))
    return SavedSlices(
        slices, slices.holders, slices.number, slices.divided, kept_settings, kept_own, kept_others, received
    )


def restore(optimizer: Any, saved: SavedSlices) -> None:
    """Gives this rank its slice as it was at a ``save``."""
    slices = saved.slices
    slices.holders, slices.number, slices.divided = saved.holders, saved.number, saved.divided
    settings, own, others = copy.deepcopy((saved.settings, saved.own, saved.others))
    slices.use(optimizer, settings, own, others)


@contextmanager
def using(optimizer: Any, saved: Any) -> Iterator[None]:
    """A context in which slices are cut anew from what was ``saved``, where ranks were lost; only slices are of use."""
    slices = slices_of(optimizer)
    if slices is None or not isinstance(saved, SavedSlices) or saved.slices is not slices:
        yield
        return
    slices.saved = saved
    try:
        yield
    finally:
        slices.saved = None


def cut_anew(optimizer: Any, slices: ParameterSlices, root: int) -> None:
    """Cuts the slices for the ranks that there are now, if these have changed since; all ranks call it between two
    steps, of which one that has joined receives its slice. If ``root`` has the state of one process, that is to come.

    Raises:
        PeerLostError: on all ranks, if a slice and its copy were lost.
    """
    slices.restore()
    communicator, parameters = slices.process_set.communicator, parameters_of(optimizer)
    request = Request("slices of optimizer state")  # one that has joined may call them otherwise

    def hear() -> tuple[list[int], bytes]:
        is_root = communicator.rank == root
        message = _description(optimizer, slices, parameters) if is_root else b""
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
    parts = _gathered(slices, holders.without(lacking), slices.divider.divided(before), slices.divider.divided(now))
    slices.divide_anew(now)
    slices.use(optimizer, heard["settings"], parts, heard["others"])


def _description(optimizer: Any, slices: ParameterSlices, parameters: Sequence[Any]) -> bytes:
    """What others need to know: one that has joined may have frozen other parameters."""
    slices.divide(optimizer)
    now = slices.divider.evenly(parameters, slices.process_set.communicator.size)
    return encoded(
        {
            "name": slices.name,
            "members": list(slices.holders.members),
            "shift": 0 if slices.saved is None else slices.saved.holders.shift,
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
    saved = None if slices.is_whole else slices.saved
    copies = decoded(saved.copy.tobytes()) if saved is not None and saved.copy.size else {}
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
