"""The check that arrays are identical on all ranks: one control message, as long as they are.

More than rounding is an error, or is healed: all take over the values of most ranks, else those of the lowest of
the ranks that agree. Or it is a warning, once for the same arrays::

    rank 0                     rank 1                     rank 2
    digest of all arrays ────── digest of all arrays ────── digest of all arrays     (1) agree: equal digests end it
    digest of each ──────────── digest of each ──────────── digest of each           (2) which arrays, of which ranks
    its values ───────────────► distance ──────────────────► distance                (3) from those of most ranks
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array, DType, ProcessSet, Request, global_process_set
from choros.errors import DriftError
from choros.wording import ranks_text

#: Differences up to so many units in the last place of an array's largest value are rounding: of other processors.
_ROUNDING = 8

_OF_ROUNDING = (
    "Rounding on different processors does that, a step that assigns trained variables itself, or a flipped bit."
)

_log = logging.getLogger("choros")
#: The arrays that ranks differ in, and went on; whether by more than rounding.
_warned_of: set[tuple[bool, tuple[str, ...]]] = set()


@dataclass(frozen=True)
class Comparison:
    """A comparison, ``before`` or after the update of ``step``; rounding errors grow with the root of the steps since
    ``first``. ``divergence``: ``"error"``, ``"heal"`` (ranks that differ receive the values of most) or ``"warn"``.
    """

    step: int = 1
    first: int = 1
    divergence: str = "error"
    before: bool = False

    @property
    def rounding(self) -> float:
        """How many units in the last place may differ.

        >>> Comparison(2, first=2).rounding, Comparison(200, first=2).rounding
        (8.0, 80.0)
        """
        return _ROUNDING * math.sqrt(max(1.0, self.step / self.first))


def are_identical(arrays: Sequence[Any], process_set: ProcessSet = global_process_set) -> bool:
    """Returns whether all ranks have the same bits in ``arrays``, as many on each, with one control message.

    >>> import choros
    >>> choros.init()
    >>> are_identical([np.ones(3)])
    True
    """
    communicator, request = process_set.communicator, Request("compare", f"{len(arrays)} arrays")
    digests = communicator.agree(request, value=digest(arrays))
    return len(set(digests)) == 1


def check_identical(
    names: Sequence[str],
    arrays: Sequence[Any],
    comparison: Comparison,
    *,
    advice: str,
    process_set: ProcessSet = global_process_set,
    assign: Callable[[int, Array], None] | None = None,
) -> None:
    """Raises the same ``DriftError`` on every rank if ``arrays`` differ by more than rounding, or heals by ``assign``.

    >>> import choros
    >>> choros.init()
    >>> check_identical(["kernel"], [np.ones(3)], Comparison(step=2), advice="Broadcast it.")
    """
    if are_identical(arrays, process_set):
        return
    communicator = process_set.communicator
    own = np.array([[digest([array]) for array in arrays]], np.int64)
    digests = [tuple(row) for row in communicator.allgather(own, name="digests").tolist()]
    most, others = _most_and_others(digests)
    suspects = [index for index in range(len(arrays)) if len({row[index] for row in digests}) > 1]
    right, distances, magnitudes = [], [], []
    for index in suspects:
        host = adapter_of(arrays[index]).to_host(arrays[index])
        right.append(communicator.broadcast(host, most, name=names[index]))
        distances.append(_distance(host, right[-1]))
        magnitudes.append(float(np.max(np.abs(right[-1].astype(np.float64)), initial=0.0)))
    table = communicator.allgather(np.array([distances]), name="distances")  # of each rank, for each suspect
    largest = table.max(axis=0)
    units = np.array([_epsilon(each.dtype) for each in right]) * magnitudes
    differing = [i for i in range(len(suspects)) if not largest[i] <= comparison.rounding * units[i]]
    worst = max(
        differing or range(len(suspects)), key=lambda position: largest[position] / (magnitudes[position] or 1.0)
    )
    farthest = communicator.ranks[int(table[:, worst].argmax())]
    count = len(differing or suspects)
    first = names[suspects[(differing or [0])[0]]]
    found = (
        f"{'before' if comparison.before else 'after'} step {comparison.step}, ranks have different values of {count} "
        f"of {len(arrays)} variables, first of {first!r}{_who(others, communicator.ranks)}. The largest "
        f"difference is in {names[suspects[worst]]!r}: up to {largest[worst]:.3g} between ranks "
        f"{communicator.ranks[most]} and {farthest}, of values up to {magnitudes[worst]:.3g}."
    )
    if comparison.divergence != "heal":
        assign = None
    if assign is not None:
        for index, value in zip(suspects, right, strict=True):
            assign(index, value)
    elif differing and comparison.divergence != "warn":
        raise DriftError(f"{found} {advice}")
    if communicator.rank:
        return
    if assign is not None:
        _log.warning("%s All ranks continue with the values of rank %d.", found, communicator.ranks[most])
        return
    said = (bool(differing), tuple(names))
    if said not in _warned_of:
        _warned_of.add(said)
        _log.warning("%s %s This is said once.", found, advice if differing else _OF_ROUNDING)


def _most_and_others(digests: Sequence[tuple[int, ...]]) -> tuple[int, list[int]]:
    """The lowest rank of those with the values that most have, and the others, if more than half have these."""
    (values, count), *_ = Counter(digests).most_common(1)  # of equally many, the first found
    others = [rank for rank, each in enumerate(digests) if each != values]
    return digests.index(values), others if 2 * count > len(digests) else []


def _who(others: Sequence[int], ranks: Sequence[int]) -> str:
    if not others:
        return ""
    named = ranks_text([ranks[rank] for rank in others], None)
    return f" ({named} {'have' if len(others) > 1 else 'has'} others than most)"


def digest(arrays: Sequence[Any]) -> int:
    """63 bits that identify the arrays' values, shapes and dtypes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        adapter = adapter_of(array)
        spec = adapter.spec(array)
        digest.update(f"{spec.dtype}{tuple(spec.shape)}".encode())
        digest.update(adapter.fingerprint(array))
    return int.from_bytes(digest.digest()) >> 1


def _distance(array: Array, other: Array) -> float:
    """The largest difference of elements; infinite where only one of them is a number."""
    one, two = array.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0.0, np.abs(one - two))
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf), initial=0.0))


def _epsilon(dtype: DType) -> float:
    """What ``finfo`` has; some releases of NumPy warn there if a framework has turned subnormal numbers off."""
    if dtype.kind in "biu":
        return 0.0
    one = np.ones((), dtype).real
    return float(np.nextafter(one, one + one)) - 1.0
