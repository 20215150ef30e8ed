"""How a loss depends on the rows of a batch: whether it is a mean over them, a sum, or neither.

An expression is read from its end, a loss, to the reductions over the rows: what comes before belongs to one row::

    0.5 * reduce_mean(per_row) + l2                 degree 0, LINEAR: ranks' losses are averaged
    reduce_sum(per_row)                             degree 1, LINEAR: they are added
    reduce_sum(per_row) / shape(x)[0]               degree 0, LINEAR
    reduce_sum(per_row * mask) / reduce_sum(mask)   degree 0, OTHER: neither the ranks' mean nor their sum
    reduce_sum(per_row) + l2                        unknown: the sum of one, and the mean of the other, are right

The degree is the power of the number of rows with which the loss grows if each row came several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

__all__ = ["CONSTANT", "COUNT", "MEAN", "SUM", "Dependence", "Form", "Term", "form_of", "is_of_rows", "reduces_rows"]


class Dependence(IntEnum):
    """What a number depends on."""

    NUMBER = 0
    """Weights, constants, and the number of rows."""
    LINEAR = 1
    """A sum or a mean over the rows, multiplied by such numbers."""
    OTHER = 2
    """Products, ratios and other functions of those."""


@final
@dataclass(frozen=True)
class Form:
    """How a number depends on the rows."""

    degree: int
    kind: Dependence


CONSTANT, COUNT = Form(0, Dependence.NUMBER), Form(1, Dependence.NUMBER)
MEAN, SUM = Form(0, Dependence.LINEAR), Form(1, Dependence.LINEAR)


@final
@dataclass(frozen=True)
class Term:
    """One step of the expression of a number, or of numbers of no rows.

    Attributes:
        operation: ``add``, ``multiply``, ``divide``, or ``apply`` for any other function.
        operands: what it is applied to.
    """

    operation: str
    operands: Sequence[Any]


def form_of(value: Any, read: Callable[[Any], Form | Term | None]) -> Form | None:
    """Returns the form of ``value``; ``None`` if it is not known.

    Args:
        value: the end of the expression.
        read: returns the form of an operand where it is known, or the step that has computed it; ``None`` for what
            cannot be read.

    Example:
        >>> expression = {"loss": Term("divide", ["total", "rows"]), "total": SUM, "rows": COUNT}
        >>> form_of("loss", expression.get) == MEAN
        True
        >>> form_of("loss", {**expression, "rows": SUM}.get)
        Form(degree=0, kind=<Dependence.OTHER: 2>)
    """
    found = read(value)
    if not isinstance(found, Term):
        return found
    forms = [form_of(operand, read) for operand in found.operands]
    known = [form for form in forms if form is not None]
    if len(known) < len(forms) or not known:
        return None
    degrees, kind = [form.degree for form in known], _joint(known)
    if found.operation == "add":
        return Form(degrees[0], kind) if len(set(degrees)) == 1 else None
    if found.operation == "multiply":
        return Form(
            sum(degrees), kind if sum(form.kind > Dependence.NUMBER for form in known) < 2 else Dependence.OTHER
        )
    if found.operation == "divide":
        dividend, divisor = known
        return Form(degrees[0] - degrees[1], dividend.kind if divisor.kind is Dependence.NUMBER else Dependence.OTHER)
    return None if any(degrees) else Form(0, Dependence.NUMBER if kind is Dependence.NUMBER else Dependence.OTHER)


def is_of_rows(length: float, rows: int) -> bool:
    """Whether a length may be that of the rows: a multiple of their number, as two images of each may be stacked.

    Example:
        >>> [length for length in (1, 4, 8, 12) if is_of_rows(length, 4)], is_of_rows(4, 1)
        ([4, 8, 12], False)
    """
    return length == rows if rows < 2 else length > 0 and length % rows == 0


def reduces_rows(lengths: Sequence[int], axes: Sequence[int], rows: int) -> bool:
    """Whether a reduction of an array of these lengths over ``axes`` is one over rows: its first axis, if that may be.

    Example:
        >>> reduces_rows((8, 16), (0,), 8), reduces_rows((8, 16), (1,), 8), reduces_rows((3, 8), (1,), 8)
        (True, False, True)
    """
    reduced = [axis % len(lengths) for axis in axes] if lengths else []
    if lengths and is_of_rows(lengths[0], rows):
        return 0 in reduced
    return any(is_of_rows(lengths[axis], rows) for axis in reduced)


def _joint(forms: Iterable[Form]) -> Dependence:
    return max(form.kind for form in forms)
