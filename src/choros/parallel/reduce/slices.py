"""Slices: the items of each gradient that a rank owns. It receives only their sums, and has only their optimizer's
state (ZeRO, stage 1: Rajbhandari et al., arXiv 1910.02054; Xu et al., arXiv 2004.13336). Three ranks, arrays a, b, c::

    flat        a a a a a a a a a a│b│c c c c c c c         even: as many bytes for each; an array is cut in at most
    rank 0      a a a a a a                                 as many parts as there are ranks
    rank 1                  a a a a b c
    rank 2                              c c c c c c
    whole       rank 0: a          rank 1: c     rank 2: b  for optimizers that need all of an array

A step, of two ranks, an array p and Adam. Each face makes the update by its framework's own code::

                 rank 0                             rank 1
    gradients    ─────────────── reducescatter ────────────────
                 g[:n]                              g[n:]
    update       p[:n], m[:n], …                    p[n:], m[n:], …
    arrays       ───────────────── allgather ──────────────────      of optax, their updates
                 p                                  p

In an elastic job another rank has a copy of each slice, and makes the same updates of it: so no message keeps it::

    slice           0        1        2        3
    rank 0          has it                     copy
    rank 1          copy     has it
    rank 2                   copy     has it
    rank 3                            copy     has it
    rank 1 is lost  rank 0   rank 2   rank 2   rank 3      send them in its step; then slices are cut for three ranks
"""

import bisect
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.comm import Array, Communicator, ProcessSet, Reduction, Request, global_process_set, has_others
from choros.comm.fusion import Exchange, Given, WireDtype, aligned_empty, concatenate_scaled, scale_into
from choros.comm.transfers import gather_shares, scatter_shares
from choros.errors import ConfigError, PeerLostError
from choros.parallel.reduce.gradients import GradientKind, Ranges, SparseRows, describe
from choros.wording import bytes_text

#: Arrays are cut at multiples of this number of items, so that loops of vector instructions, and what they leave over,
#: have the same items, and compute the same bits.
_ALIGNED_ITEMS = 64

_log = logging.getLogger("choros")

#: What ranks ask before updates, and pass to ``check_loaded``.
LOADED = Request("whether an optimizer's state was loaded")


def check_loaded(loads: Sequence[int], ranks: Sequence[int]) -> None:
    """Raises ConfigError if some of the ``ranks`` have loaded a state of one process oftener than others."""
    having = [rank for rank, each in zip(ranks, loads, strict=True) if each > min(loads)]
    if having:
        lacking = sorted({*ranks} - {*having})
        raise ConfigError(
            f"ranks {having} have loaded the optimizer's state, and ranks {lacking} have not: with shard_state each "
            "keeps its own slice of what it loads. Load the file on all ranks; each reads its slice."
        )


def even_slices(sizes: Sequence[int], rows: Sequence[int], ranks: int) -> tuple[Ranges, ...]:
    """Returns for each flat array of ``sizes`` its items on each rank; the sums differ by some items. An array of
    ``rows`` of more than one item is cut between rows, and any other at multiples of 64 items.

    >>> even_slices([200, 1, 23], [1, 1, 1], 2)
    (((0, 128), (128, 200)), ((0, 0), (0, 1)), ((0, 0), (0, 23)))
    """
    ends = [*accumulate(sizes)]
    total = ends[-1] if ends else 0
    cuts = [0]
    for rank in range(1, ranks):
        wanted = total * rank // ranks
        index = bisect.bisect_right(ends, wanted)
        start = ends[index] - sizes[index] if index < len(ends) else total
        step = _ALIGNED_ITEMS if index >= len(rows) or rows[index] == 1 else rows[index]
        cut = start + round((wanted - start) / step) * step
        cuts.append(max(cuts[-1], min(cut, ends[index] if index < len(ends) else total)))
    cuts.append(total)
    return tuple(
        tuple((min(max(low - start, 0), size), min(max(high - start, 0), size)) for low, high in pairwise(cuts))
        for start, size in zip([0, *ends], sizes, strict=False)
    )


def whole_slices(sizes: Sequence[int], ranks: int) -> tuple[Ranges, ...]:
    """Returns as ``even_slices`` does, each array whole on one rank: the largest first, on the rank that has least.

    >>> whole_slices([4, 9, 6], 2)
    (((0, 0), (0, 4)), ((0, 9), (0, 0)), ((0, 0), (0, 6)))
    """
    owners, loads = [0] * len(sizes), [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return tuple(
        tuple((0, size if rank == owner else 0) for rank in range(ranks))
        for size, owner in zip(sizes, owners, strict=True)
    )


@final
@dataclass(frozen=True)
class Holders:
    """Who has which slices: ``members``, numbered as the launcher does, one each; and in an elastic job the member that
    is ``shift`` places further has a copy. A new rank may have the number of one that was ``lost``, but no slices.

    >>> holders = Holders.of((0, 1, 2, 3), ["a", "a", "b", "b"], copies=True)
    >>> [holders.slices_of(member) for member in holders.members]
    [(0, 2), (1, 3), (0, 2), (1, 3)]
    >>> holders.without({1}).sent((0, 2, 3))
    [[0], [2], [1, 3]]
    """

    members: tuple[int, ...]
    shift: int = 0
    lost: frozenset[int] = frozenset()

    @classmethod
    def of(cls, members: Sequence[int], hosts: Sequence[str], *, copies: bool) -> "Holders":
        """Places copies on other hosts, if there are any, and otherwise on the next member."""
        size = len(members)

        def apart(shift: int) -> tuple[int, int]:
            return sum(hosts[place] != hosts[(place + shift) % size] for place in range(size)), -shift

        return cls(tuple(members), max(range(1, size), key=apart) if copies and size > 1 else 0)

    @classmethod
    def now(cls, communicator: Communicator) -> "Holders":
        """Who is to have which slices, as ranks are now."""
        return cls.of(communicator.launched, communicator.hosts(), copies=communicator.elastic)

    def without(self, lost: Collection[int]) -> "Holders":
        """These, after members were lost."""
        return replace(self, lost=self.lost | {*lost})

    def has(self, member: int) -> bool:
        """Whether a member has slices."""
        return member in self.members and member not in self.lost

    def slices_of(self, member: int) -> tuple[int, ...]:
        """The slices that a member has, or copies of them."""
        if not self.has(member):
            return ()
        place = self.members.index(member)
        return tuple(sorted({place, (place - self.shift) % len(self.members)}))

    def sent(self, present: Sequence[int]) -> list[list[int]]:
        """The slices that each of the ``present`` members sends to the others, by its rank.

        Raises:
            PeerLostError: those that had a slice were all lost.
        """
        ranks = {member: rank for rank, member in enumerate(present) if self.has(member)}
        sent: list[list[int]] = [[] for _ in present]
        for place, member in enumerate(self.members):
            copy = self.members[(place + self.shift) % len(self.members)]
            sender = ranks.get(member, ranks.get(copy))
            if sender is None:
                raise _slice_lost(member, copy)
            sent[sender].append(place)
        return sent


def check_process_set(process_set: ProcessSet) -> None:
    """Raises an error if the ranks of this set cannot have slices of an optimizer's state."""
    if process_set is not global_process_set and process_set.included() and process_set.communicator.elastic:
        raise ConfigError(
            "shard_state=True is not supported for some ranks of an elastic job, in which the slices of a lost rank "
            "would be lost with it: leave shard_state or process_set out, or start a job without --min-np."
        )


def check_slices(number: int, communicator: Communicator) -> None:
    """Raises an error, on all ranks, if they have become more or fewer than there are slices, of which each has one."""
    if number != communicator.size:
        raise PeerLostError(
            f"the optimizer's state is divided among {number} ranks, and there are {communicator.size} now: use "
            "hvd.elastic.run, whose commits have the state of lost ranks, too, or start the job again.",
            ends_job=not communicator.raises_loss,
        )


def _slice_lost(member: int, copy: int) -> PeerLostError:
    if member == copy:
        text = (
            f"rank {member} at the start of the job was lost, and with it a slice of the optimizer's state: use "
            "hvd.elastic.run, whose commits have copies, or start the job again."
        )
    else:
        text = (
            f"ranks {member} and {copy} at the start of the job were both lost, and with them a slice of the "
            "optimizer's state and its copy: the job is to start again, from its last commit."
        )
    return PeerLostError(text, ranks=tuple({member, copy}), ends_job=True)


def scatter_exchange(communicator: Communicator, layout: Sequence[GradientKind], wire_dtype: WireDtype) -> Exchange:
    """Sums arrays by reducescatters, as they are or cast: each rank receives its items of each array, flat."""
    groups = [
        (dtype, wire_dtype(dtype), [index for index, each in enumerate(layout) if each.dtype == dtype])
        for dtype in dict.fromkeys(each.dtype for each in layout)
    ]

    def reduce(arrays: Given, before: float, after: float, out: Given = None) -> list[Array]:
        if out is None:
            out = [aligned_empty((each.items(communicator.rank),), each.dtype) for each in layout]
        results = list(out)
        for dtype, wire, indices in groups:
            kinds = [layout[index] for index in indices]
            if arrays is None:
                zero = np.zeros(1, dtype)
                flats = [np.broadcast_to(zero, math.prod(each.shape)) for each in kinds]
            else:
                flats = [arrays[index].reshape(-1) for index in indices]
            targets = [results[index] for index in indices if results[index].size]

            def fill(parts: Sequence[Array], out: Array) -> None:
                concatenate_scaled(parts, out, before)

            def write(reduced: Array, target: Array) -> None:
                scale_into(target, reduced, after)

            plain = before == 1.0 and wire == dtype
            shares = _shares(kinds, flats, communicator.size)
            scatter_shares(communicator, shares, wire, Reduction.SUM, targets, write, None if plain else fill)
        return results

    return Exchange(", ".join(f"scattered {wire}" for _, wire, _ in groups), reduce)


def own_items_exchange(exchange: Exchange, layout: Sequence[GradientKind], rank: int) -> Exchange:
    """Sums arrays by another exchange, and keeps this rank's items: of compressed gradients, or those on a device."""

    def reduce(arrays: Given, before: float, after: float, _: Given = None) -> list[Any]:
        whole = exchange.sum(arrays, before, after)
        return [own_items(array, *each.ranges[rank]) for array, each in zip(whole, layout, strict=True)]

    return Exchange(f"{exchange.description}, in slices", reduce)


def own_items(array: Any, start: int, stop: int) -> Any:
    """Returns items ``start … stop - 1`` of a gradient; of ``SparseRows`` the rows that have these.

    >>> own_items(SparseRows(np.array([4, 1]), np.ones((2, 3)), (5, 3)), 9, 15).indices
    array([1])
    """
    if not isinstance(array, SparseRows):
        return array.reshape(-1)[start:stop]
    width = math.prod(array.shape[1:])
    first, last = start // width, stop // width
    kept = (array.indices >= first) & (array.indices < last)
    return SparseRows(array.indices[kept] - first, array.values[kept], (last - first, *array.shape[1:]))


def gather_slices(
    communicator: Communicator,
    layout: Sequence[GradientKind],
    held: Mapping[tuple[int, int], Array],
    outs: Sequence[Array] | None = None,
    name: str = "",
    holders: Holders | None = None,
) -> list[Array]:
    """Gathers arrays of which ranks have slices: ``held`` are this rank's items, by the numbers of the slice and of the
    array. They are written to ``outs``, flat and maybe the memory of ``held``, or new ones. All ranks call it with the
    same ``layout``. ``holders``: of these ranks some may be lost meanwhile, and ``outs`` are other memory; else each
    has its slice only.

    Raises:
        PeerLostError: on all ranks, if those that had a slice were all lost.

    >>> from choros.comm.engines.threads import run_threads
    >>> layout = [GradientKind((5,), np.dtype("float32"), ((0, 2), (2, 5)))]
    >>> def gather(communicator):
    ...     items = np.full(layout[0].items(communicator.rank), communicator.rank, np.float32)
    ...     return gather_slices(communicator, layout, {(communicator.rank, 0): items})[0].tolist()
    >>> run_threads(gather, 2)
    [[0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0]]
    """
    request = _gather_request(tuple(layout), name)
    flats = [aligned_empty((math.prod(each.shape),), each.dtype) for each in layout] if outs is None else outs

    def collective() -> None:
        if holders is None:
            check_slices(len(layout[0].ranges) if layout else communicator.size, communicator)
        sent = (holders or Holders(communicator.launched)).sent(communicator.launched)
        order = [*chain(*sent)]
        communicator.agree(request)
        # Large arrays are received where they are to be, if ranks have their parts in the order of the ranks.
        least = communicator.direct_bytes if order == sorted(order) else None
        large = {i for i, flat in enumerate(flats) if least is not None and flat.nbytes >= least}
        for index in large:
            flat, ranges = flats[index], layout[index].ranges
            for number in sent[communicator.rank]:
                target = flat[slice(*ranges[number])]
                if target.size and not np.may_share_memory(target, held[number, index]):
                    target[...] = held[number, index].reshape(-1)
            communicator.gather_in_place(flat, [sum(layout[index].items(number) for number in each) for each in sent])
        for dtype in dict.fromkeys(each.dtype for each in layout):
            same = [index for index, each in enumerate(layout) if each.dtype == dtype and index not in large]
            parts = _shares([layout[i] for i in same], [flats[i] for i in same], len(order))
            pairs = [(number, i) for number in sent[communicator.rank] for i in same if layout[i].items(number)]
            own = [held[pair].reshape(-1) for pair in pairs]
            gather_shares(communicator, own, [[part for number in each for part in parts[number]] for each in sent])

    communicator.atomic(collective)
    return [flat.reshape(each.shape) for flat, each in zip(flats, layout, strict=True)]


def gather_parts(
    communicator: Communicator, holders: Holders, part: Callable[[int], NDArray[np.uint8]]
) -> list[NDArray[np.uint8]]:
    """Gathers ``part(number)`` of each slice from a rank that has it; by slice, its bytes. All ranks call it."""
    sent = holders.sent(communicator.launched)
    order, own = [*chain(*sent)], [part(number) for number in sent[communicator.rank]]
    sizes = np.array([len(each) for each in own], np.int64).view(np.uint8)
    gathered = communicator.gather_bytes(sizes, [8 * len(numbers) for numbers in sent])
    lengths = dict(zip(order, gathered.view(np.int64).tolist(), strict=True))
    counts = [sum(lengths[number] for number in numbers) for numbers in sent]
    together = communicator.gather_bytes(np.concatenate([*own, np.empty(0, np.uint8)]), counts)
    parts = dict(zip(order, np.split(together, np.cumsum([*lengths.values()])[:-1]), strict=True))
    return [parts[number] for number in range(len(order))]


def _shares(layout: Sequence[GradientKind], flats: Sequence[Array], ranks: int) -> list[list[Array]]:
    """By rank, the parts of flat arrays that it has."""
    pairs = list(zip(layout, flats, strict=True))
    return [[flat[slice(*each.ranges[rank])] for each, flat in pairs if each.items(rank)] for rank in range(ranks)]


@functools.lru_cache(maxsize=64)
def _gather_request(layout: tuple[GradientKind, ...], name: str) -> Request:
    return Request("weights", describe(layout), name)


def log_memory(optimizer: str, weights: int, state: Callable[[], tuple[int, int]], process_set: ProcessSet) -> None:
    """Logs on the first rank what a rank has in memory of what is trained, as ``chorosrun --verbose`` shows once; see
    ``choros memory``. ``optimizer``: the name of its class; ``weights``, ``state``: bytes.
    """
    if has_others(process_set) and process_set.communicator.rank == 0 and _log.isEnabledFor(logging.INFO):
        _log.info("%s", memory_text(optimizer, weights, *state(), process_set.communicator.size))


def memory_text(optimizer: str, weights: int, own: int, whole: int, ranks: int) -> str:
    """What a rank has, as a sentence; of the state its ``own`` bytes, and those of one process.

    >>> memory_text("Adam", 4 << 20, 4 << 20, 8 << 20, 2)
    'memory of a rank: 4 MiB of weights, 4 MiB of gradients, 4 MiB of 8 MiB of the state of Adam (shard_state).'
    >>> memory_text("SGD", 4 << 20, 0, 0, 2)
    'memory of a rank: 4 MiB of weights, 4 MiB of gradients, 0 B of the state of SGD.'
    """
    size, kept, note = bytes_text(weights), bytes_text(own), ""
    if own < whole:
        kept, note = f"{kept} of {bytes_text(whole)}", " (shard_state)"
    elif ranks > 1 and own >= weights > 0:
        note = f"; with shard_state about {bytes_text(own / ranks)}"
    return f"memory of a rank: {size} of weights, {size} of gradients, {kept} of the state of {optimizer}{note}."
