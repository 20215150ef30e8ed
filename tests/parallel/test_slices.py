"""Parts of slices are gathered from ranks that have them, also if copies take the place of what was lost."""

from types import SimpleNamespace

import numpy as np
import pytest

from choros.comm.engines.threads import ThreadCommunicator, run_threads
from choros.parallel.reduce.slices import Holders, gather_parts


@pytest.mark.parametrize(
    ("size", "shift", "lost"), [(1, 0, ()), (2, 0, ()), (3, 1, ()), (3, 1, (1,)), (3, 2, (0,)), (2, 1, (0,))]
)
def test_parts_come_by_slice_from_who_has_them(size: int, shift: int, lost: tuple[int, ...]) -> None:
    members = tuple(range(size + len(lost)))
    present = tuple(member for member in members if member not in lost)
    holders = Holders(members, shift, frozenset(lost))
    parts = [np.full(0 if number == 2 else 3 * number, number, np.uint8) for number in members]

    def gather(communicator: ThreadCommunicator) -> list[list[int]]:
        own = {number: parts[number] for number in holders.slices_of(present[communicator.rank])}
        names = {name: getattr(communicator, name) for name in ("rank", "size", "gather_bytes")}
        gathered = gather_parts(SimpleNamespace(launched=present, **names), holders, own.__getitem__)
        return [part.tolist() for part in gathered]

    assert run_threads(gather, size) == [[part.tolist() for part in parts]] * size
