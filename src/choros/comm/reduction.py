"""How arrays are reduced: the operations, and which number format each dtype is summed in."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from choros.errors import ConfigError, UnsupportedError

#: NumPy's: an array on the host, and its dtype.
Array = NDArray[Any]
DType = np.dtype[Any]

BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)

#: Every dtype the collectives take.
DTYPES: tuple[DType, ...] = (
    *(np.dtype(name) for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
    *(np.dtype(name) for name in ("float16", "float32", "float64")),
    BFLOAT16,
)

_KNOWN = frozenset(DTYPES)


class Reduction(enum.IntEnum):
    """What a reduction does with the ranks' values; members are Horovod's integers. On booleans ``SUM`` and ``MAX``
    are *or*, ``PRODUCT`` and ``MIN`` are *and*, ``AVERAGE`` is refused; of integers it rounds towards zero. bfloat16
    is reduced in float32 and rounded once. ``ADASUM`` is for floating-point allreduces (``adasum.py``).

        >>> Reduction.SUM == 1, Reduction(1), Reduction("sum")
        (True, <Reduction.SUM: 1>, <Reduction.SUM: 1>)
    """

    AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

    @property
    def title(self) -> str:
        """Its name in messages, such as ``Sum``."""
        return self.name.title()

    @classmethod
    def _missing_(cls, value: object) -> Reduction:
        """Accepts names in any case, as ``Reduction("sum")``."""
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        names = ", ".join(member.title for member in cls)
        raise ConfigError(f"op={value!r} is no reduction: expected one of {names}.")


#: What NumPy calls the operations that engines carry out.
UFUNCS: dict[Reduction, np.ufunc] = {
    Reduction.SUM: np.add,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
}


def dtype_problem(dtype: DType, op: Reduction | None = None, *, whole: bool = False) -> ConfigError | None:
    """Why ``dtype`` cannot be moved, or reduced, if it cannot; Adasum needs ``whole`` arrays on all ranks."""
    if dtype not in _KNOWN:
        names = ", ".join(str(known) for known in DTYPES)
        return ConfigError(f"arrays of dtype {dtype} cannot be communicated; the dtypes that can are {names}.")
    if op is Reduction.ADASUM and not whole:
        return UnsupportedError(
            "op=Adasum combines whole arrays: allreduce and grouped_allreduce have it; use Average or Sum here."
        )
    if op is Reduction.ADASUM and dtype.kind != "f" and dtype != BFLOAT16:
        return ConfigError(
            f"op=Adasum scales arrays by their directions and needs floating-point values, not {dtype}: cast the array "
            "first, or use Average or Sum."
        )
    if op is Reduction.AVERAGE and dtype == np.bool_:
        return ConfigError(
            "booleans have no average that is a boolean: cast to float32 for the share of true values, or use "
            "op=Max for 'any' and op=Min for 'all'."
        )
    return None


@functools.cache
def working_op(dtype: DType, op: Reduction) -> Reduction:
    """The operation an engine carries out: averages are sums, booleans are bytes of 0 and 1."""
    if dtype == np.bool_:
        return {Reduction.SUM: Reduction.MAX, Reduction.PRODUCT: Reduction.MIN}.get(op, op)
    return Reduction.SUM if op is Reduction.AVERAGE else op


def working_dtype(dtype: DType) -> DType:
    """The dtype an engine reduces for arrays of ``dtype``."""
    if dtype == BFLOAT16:
        return np.dtype(np.float32)
    return np.dtype(np.uint8) if dtype == np.bool_ else dtype


@functools.cache
def wide_dtype(dtype: DType) -> DType:
    """The dtype in which floating-point numbers of ``dtype`` are added and scaled here, to be rounded once."""
    return np.result_type(dtype, np.float32)


@functools.cache
def loses_nans(op: Reduction, dtype: DType) -> bool:
    """Whether the own reductions of MPI and Gloo may lose a NaN, or not, as ranks have it; NumPy's keep each."""
    return op in (Reduction.MIN, Reduction.MAX) and dtype.kind == "f"


def writer(op: Reduction, size: int) -> Callable[[Array, Array], None]:
    """What writes the meaning of ``size`` ranks' reduced items, its first argument, to its second, maybe the same:
    their quotient if ``op`` is the average.

    >>> reduced = np.array([3.0, 4.0])
    >>> writer(Reduction.AVERAGE, 2)(reduced, reduced)
    >>> reduced
    array([1.5, 2. ])
    """
    return functools.partial(_write_average, size) if op is Reduction.AVERAGE else _write


def _write(working: Array, flat: Array) -> None:
    if flat is not working:
        flat[...] = working  # of each small gradient: np.copyto takes a third longer


def _write_average(size: int, working: Array, flat: Array) -> None:
    if working.dtype.kind in "iu":
        if size > np.iinfo(working.dtype).max:
            working = working.astype(np.int64)
        quotient = working // size
        # Floor division rounds down; an average rounds towards zero.
        quotient += (working < 0) & (quotient * size != working)
        np.copyto(flat, quotient, casting="unsafe")
    else:
        np.divide(working, working.dtype.type(size), out=flat, casting="unsafe")
