"""How arrays are reduced: the five operations, and which number format each dtype is summed in."""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from choros.errors import ConfigError

__all__ = ["BFLOAT16", "DTYPES", "ReduceOp", "check_dtype", "from_working", "to_working", "working_op"]

BFLOAT16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)

#: Every dtype the collectives take.
DTYPES: tuple[np.dtype[np.generic], ...] = (
    *(np.dtype(name) for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
    *(np.dtype(name) for name in ("float16", "float32", "float64")),
    BFLOAT16,
)


class ReduceOp(enum.Enum):
    """What a reduction does with the ranks' values.

    On booleans ``SUM`` and ``MAX`` are *or*, ``PRODUCT`` and ``MIN`` are *and*, and ``AVERAGE`` is refused.
    ``AVERAGE`` of integers rounds towards zero. bfloat16 is reduced in float32 and rounded once.
    """

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


def check_dtype(dtype: np.dtype[np.generic], op: ReduceOp | None = None) -> None:
    """A ``ConfigError`` if ``dtype`` cannot be moved, or not be reduced with ``op``."""
    if dtype not in DTYPES:
        names = ", ".join(str(known) for known in DTYPES)
        raise ConfigError(f"arrays of dtype {dtype} cannot be communicated; the dtypes that can are {names}.")
    if op is ReduceOp.AVERAGE and dtype == np.bool_:
        raise ConfigError(
            "booleans have no average that is a boolean: cast to float32 for the share of true values, or use "
            "op=Max for 'any' and op=Min for 'all'."
        )


def working_op(dtype: np.dtype[np.generic], op: ReduceOp) -> ReduceOp:
    """The operation an engine carries out: averages are sums, booleans are bytes of 0 and 1."""
    if dtype == np.bool_:
        return {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}.get(op, op)
    return ReduceOp.SUM if op is ReduceOp.AVERAGE else op


def to_working(array: NDArray[Any]) -> NDArray[Any]:
    """A flat copy of ``array`` in the format its dtype is reduced in."""
    if array.dtype == BFLOAT16:
        return array.astype(np.float32).reshape(-1)
    if array.dtype == np.bool_:
        return array.astype(np.uint8).reshape(-1)
    return array.flatten()


def from_working(working: NDArray[Any], dtype: np.dtype[np.generic], op: ReduceOp, size: int) -> NDArray[Any]:
    """What ``size`` ranks' reduced ``working`` copy means in ``dtype``; divides if ``op`` is the average."""
    if op is ReduceOp.AVERAGE:
        if working.dtype.kind in "iu":
            quotient = working // size
            # Floor division rounds down; an average rounds towards zero.
            quotient += (working < 0) & (quotient * size != working)
            working = quotient
        else:
            working /= working.dtype.type(size)
    if dtype == np.bool_:
        return working.view(np.bool_)
    return working.astype(dtype, copy=False)
