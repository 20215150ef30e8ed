"""Joining: a rank without batches takes part in what the others do, until no rank has batches. It need not know the
order: every control message tells what comes next. A step with a loss that needs its divisor over all ranks, two
optimizers and a last batch of one row::

    rank 0, with the row             rank 1, without
    divisor of the loss        ───►  joined: adds zero
    gradients of optimizer 1   ───►  joined: adds zeros
    gradients of optimizer 2   ───►  joined: adds zeros
    joined                     ───►  joined                 the epoch ends on both
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from choros.comm.members import KNOWN, LEARNS, UNKNOWN, Members
from choros.comm.process_set import ProcessSet, global_process_set
from choros.comm.request import JOINED, SHUTDOWN, CollectiveSpec, Request
from choros.comm.transfers import (
    broadcast_from,
    exchange_rows,
    gather_all,
    gather_rows,
    reduce_all,
    reduce_and_scatter,
    sum_numbers,
)
from choros.errors import ConfigError, EngineError

#: For each request that does not say itself, by its spec, what a joined rank does: its part after the control message;
#: it receives the value of each rank.
Participation = Mapping[Request, Callable[[Sequence[int]], None]]
#: The part of a joined rank.
_Part = Callable[[Sequence[int]], None] | CollectiveSpec


def join(members: Members, participation: Participation, learn: Callable[[bytes], Participation] | None = None) -> None:
    """Participates in the others' collectives until all have joined; sets ``last_joined``. Requests with a spec need
    not be in ``participation``; what is not, the first rank that has not joined explains once (``Request.explain``), to
    ``learn``. If a rank cannot participate, all raise a ``MismatchError``::

        rank 0                 rank 1                 rank 2, which has joined
        agree(a, value=8)      agree(a, value=3)      its part of a, given [8, 3, 0]
        allgather(rows)        allgather(rows)        gives no rows, by itself
        agree(b, value=8)      its part of b, given [8, 0, 0], which rank 2 does, too
        join                   join                   join                             all have joined
    """
    learned: dict[int, _Part] = {}

    def join_once() -> bool:
        """Participates in one collective; returns whether all ranks have joined."""
        digests, values = members.gather(JOINED, 0)
        others = {*digests} - {JOINED.digest}
        if not others:
            return True
        if len(others) > 1 and SHUTDOWN.digest not in others:
            members.mismatch(JOINED, digests)  # the others' calls differ; they report it
            return False
        (digest, *_) = others
        of_request = (part for request, part in participation.items() if request.digest == digest)
        part = next(of_request, learned.get(digest))
        answer = members.explain_to_joined(JOINED, digests, knows=KNOWN if part else LEARNS if learn else UNKNOWN)
        if answer is None:
            raise members.mismatch(JOINED, digests)
        if part is None:
            part = learned[digest] = answer if isinstance(answer, CollectiveSpec) else explained(answer, digest)
        if not isinstance(part, CollectiveSpec):
            part(values)
        elif part.root is None or digests[part.root] != JOINED.digest:
            _take_part_in(members, part, values)
        return False

    def explained(message: bytes, digest: int) -> _Part:
        parts = learn(message) if learn else {}
        learned.update((request.digest, part) for request, part in parts.items())
        if digest not in learned:
            raise EngineError(
                "this rank has joined, and cannot do what the others do next: it has another device, or other "
                f"settings of CHOROS_…. It would do: {'; '.join(map(str, parts))}."
            )
        return learned[digest]

    while not members.atomic(join_once):
        pass
    members.last_joined, members.not_joined = members.not_joined, ()


def last_to_join(members: Members) -> int:
    """Returns the first member left of those that joined last, the last time; PeerLostError if all were lost."""
    return members.first_left(members.last_joined or members.launched, "the last rank that had batches")


def process_set_of(sets: Iterable[ProcessSet], owners: str) -> ProcessSet:
    """Returns the one whose ranks a rank that joins waits for, all ranks if ``owners`` have none."""
    different = set(sets) or {global_process_set}
    if len(different) > 1:
        raise ConfigError(
            f"join() cannot tell which ranks to wait for: the {owners} belong to {len(different)} process sets. Stop "
            "at the same batch on all ranks."
        )
    return different.pop()


def _take_part_in(members: Members, spec: CollectiveSpec, values: Sequence[int]) -> None:
    """Does the part of a rank without rows: with zeros, or with none."""
    layout = tuple((shape, np.dtype(name)) for name, shape in spec.arrays)
    match spec.collective:
        case "allreduce" | "grouped_allreduce":
            zeros = [np.zeros(shape, dtype) for shape, dtype in layout]
            reduce_all(members, layout, zeros, spec.op, None)
        case "reducescatter" | "grouped_reducescatter":
            reduce_and_scatter(members, [np.zeros(shape, dtype) for shape, dtype in layout], spec.op)
        case "broadcast":
            ((shape, dtype),) = layout
            broadcast_from(members, spec.root or 0, np.zeros(shape, dtype))
        case "allgather":
            ((inner, dtype),) = layout
            gather_rows(members, np.zeros((0, *inner), dtype), values)
        case "grouped_allgather":
            empty = [np.zeros((0, *inner), dtype) for inner, dtype in layout]
            gather_all(members, empty, np.zeros(len(empty), np.int64), values)
        case "alltoall":
            ((inner, dtype),) = layout
            exchange_rows(members, np.zeros((0, *inner), dtype), np.zeros(members.size, np.int64))
        case "sum":
            sum_numbers(members, np.zeros(max(values)), values, spec.differ)
