"""The check that arrays are identical on all ranks: one control message, as long as they are.

::

    rank 0                     rank 1
    digest of all arrays ────── digest of all arrays         (1) agree: equal digests end the check
    digest of each ──────────── digest of each               (2) which arrays differ
    its values ───────────────► distance from them           (3) by how much: an error, if more than rounding
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from choros.comm import ProcessSet, Request, global_process_set
from choros.errors import DriftError

__all__ = ["are_identical", "check_identical"]

Array = NDArray[Any]
#: Differences up to this many units in the last place of an array's largest value are rounding: hosts may have
#: different processors.
_ROUNDING = 8


def are_identical(arrays: Sequence[Array], process_set: ProcessSet = global_process_set) -> bool:
    """Returns whether all ranks have the same bits in ``arrays``, with one control message.

    Args:
        arrays: host arrays, as many on every rank.
        process_set: the ranks that participate.

    Example:
        >>> import choros
        >>> choros.init()
        >>> are_identical([np.ones(3)])
        True
    """
    digests = process_set.communicator.agree(Request("compare", f"{len(arrays)} arrays"), value=_digest(arrays))
    return len(set(digests)) == 1


def check_identical(
    names: Sequence[str],
    arrays: Sequence[Array],
    *,
    when: str,
    advice: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raises an error on every rank if the ranks' ``arrays`` differ by more than rounding.

    Args:
        names: the arrays' names, for the error.
        arrays: host arrays, of the same shapes and dtypes on every rank.
        when: the beginning of the error's sentence, such as ``"after the first step"``.
        advice: what the user can do; the end of the error.
        process_set: the ranks that participate.

    Raises:
        DriftError: they differ. The text is the same on every rank; it names the array that differs most.

    Example:
        >>> import choros
        >>> choros.init()
        >>> check_identical(["kernel"], [np.ones(3)], when="after the first step", advice="Broadcast it.")
    """
    if are_identical(arrays, process_set):
        return
    communicator = process_set.communicator
    digests = communicator.allgather(np.array([[_digest([array]) for array in arrays]], np.int64), name="digests")
    suspects = [index for index in range(len(arrays)) if len(set(digests[:, index].tolist())) > 1]
    distances, magnitudes = [], []
    for index in suspects:
        first = communicator.broadcast(arrays[index], 0, name=names[index])
        distances.append(_distance(arrays[index], first))
        magnitudes.append(float(np.max(np.abs(first.astype(np.float64)), initial=0.0)))
    table = communicator.allgather(np.array([distances]), name="distances")  # of each rank, for each suspect
    largest = table.max(axis=0)
    limits = np.array([_ROUNDING * _epsilon(arrays[index].dtype) for index in suspects]) * magnitudes
    differing = [position for position in range(len(suspects)) if not largest[position] <= limits[position]]
    if not differing:
        return
    worst = max(differing, key=lambda position: largest[position] / (magnitudes[position] or 1.0))
    rank = communicator.ranks[int(table[:, worst].argmax())]
    raise DriftError(
        f"{when}, ranks have different values of {len(differing)} of {len(arrays)} trained variables. The largest "
        f"difference is in {names[suspects[worst]]!r}: up to {largest[worst]:.3g} between ranks "
        f"{communicator.ranks[0]} and {rank}, of values up to {magnitudes[worst]:.3g}. {advice}"
    )


def _digest(arrays: Sequence[Array]) -> int:
    """63 bits that identify the arrays' values, shapes and dtypes."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest()) >> 1


def _distance(array: Array, other: Array) -> float:
    """The largest difference of elements; infinite where only one of them is a number."""
    one, two = array.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0.0, np.abs(one - two))
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf), initial=0.0))


def _epsilon(dtype: np.dtype[np.generic]) -> float:
    return 0.0 if dtype.kind in "biu" else float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
