"""How a loss depends on the rows of a batch: whether it is a mean over them, a sum, or neither.

A program is read from the batch to the loss. Each value has a *form*, and the axis of the rows as long as it has one::

    x, y                            the rows are axis 0
    square(x @ w - y)               each row by itself: axis 0
    mean(…, axis=1)                 axis 0
    sum(…)                          no rows any more; degree 1, LINEAR: ranks' losses are added
    sum(…) / shape(x)[0]            degree 0, LINEAR: they are averaged
    sum(… * mask) / sum(mask)       degree 0, OTHER: neither the ranks' mean nor their sum
    sum(…) + l2(w)                  not known: the sum of one, and the mean of the other, are right

The degree is the power of the number of rows with which the loss grows if each row came several times. A number that
equals that of the rows may be theirs, or a constant of the program: then a value has several forms that are possible.
"""

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, final

#: A divisor up to this, or 1, may as well be a constant as the number of rows.
_USUAL = 4

Shape = tuple[int | None, ...]


class Dependence(IntEnum):
    """What a value depends on."""

    NUMBER = 0
    """Weights, constants, and the number of rows."""
    LINEAR = 1
    """A sum or a mean over the rows of functions of each, multiplied by such numbers; or a function of each row."""
    OTHER = 2
    """Products, ratios and other functions of those sums and means."""


@final
@dataclass(frozen=True)
class Form:
    """How a value depends on the rows."""

    degree: int
    kind: Dependence


CONSTANT, COUNT = Form(0, Dependence.NUMBER), Form(1, Dependence.NUMBER)
MEAN, SUM = Form(0, Dependence.LINEAR), Form(1, Dependence.LINEAR)
_OTHER = Form(0, Dependence.OTHER)
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, **COMPARISONS}
_LOSSES = frozenset((CONSTANT, MEAN, SUM))


@final
@dataclass(frozen=True)
class ValueForm:
    """What is known of an array: shape (``None``: known when it runs), forms (none: unknown), axis of the rows, number.
    ``averaged``: of a sum over axes, the number of elements that each is the sum of, and the forms of their mean.
    """

    shape: Shape
    forms: frozenset[Form] = frozenset((CONSTANT,))
    axis: int | None = None
    number: float | None = None
    averaged: tuple[float, frozenset[Form]] | None = None

    @property
    def total(self) -> Form | None:
        """The form of the sum of its elements; ``None`` if that is not known."""
        forms = self.forms if self.axis is None else {Form(each.degree + 1, each.kind) for each in self.forms}
        likely = forms & _LOSSES or forms
        return next(iter(likely)) if len(likely) == 1 else None


@final
class Reading:
    """The rules by which a program's values follow from each other; ``rows``: empty if it does not know them.

    >>> reading = Reading([8])
    >>> x, w = reading.leaf((8, 3)), ValueForm((3,))
    >>> product = reading.arithmetic("mul", [x, w], (8, 3))
    >>> total = reading.reduce(product, (0, 1), ())
    >>> total.total == SUM, reading.arithmetic("div", [total, ValueForm((), number=24.0)], ()).total == MEAN
    (True, True)
    """

    def __init__(self, rows: Collection[int]) -> None:
        self._rows = frozenset(max(each, 1) for each in rows)  # a rank without rows computes on one

    def leaf(self, shape: Shape) -> ValueForm:
        """An array that is given to the program, and is no weight: one of rows, if it may be that."""
        is_of_rows = bool(shape) and (shape[0] is None or shape[0] in self._rows)
        return ValueForm(shape, frozenset((MEAN,)), 0) if is_of_rows else ValueForm(shape)

    def made(self, shape: Shape, number: float | None = None, *, random: bool = False) -> ValueForm:
        """An array that the program makes: of one number, or of random ones."""
        forms = frozenset((MEAN if random else CONSTANT,))
        return ValueForm(shape, forms, self._new_axis(shape, range(len(shape))), number)

    def follow(self, rule: str, operands: Sequence[ValueForm], shape: Shape) -> ValueForm:
        """A result that depends on nothing but the operands: ``apply``, if there is no such rule for it."""
        if rule in COMPARISONS:
            kinds = {form.kind for each in operands for form in each.forms}
            are_numbers = kinds == {Dependence.NUMBER} and all(each.axis is None for each in operands)
            return ValueForm(shape, number=_folded(rule, operands)) if are_numbers else self.apply(operands, shape)
        match rule:
            case "same":
                return replace(operands[0], shape=shape)
            case "reshape":
                return self.reshape(operands[0], shape)
            case "square":
                return self.arithmetic("mul", [operands[0], operands[0]], shape)
            case "select" if len(operands) == 3:
                return self.select(operands, shape)
            case "concatenate":
                return self.concatenate(operands, shape)
            case "add" | "sub" | "mul" | "div":
                return self.arithmetic(rule, operands, shape)
        return self.apply(operands, shape)

    def transpose(self, value: ValueForm, shape: Shape, order: Sequence[int]) -> ValueForm:
        """The same elements, with the axes in another ``order``."""
        return replace(value, shape=shape, axis=None if value.axis is None else order.index(value.axis))

    def stack(self, parts: Sequence[ValueForm], shape: Shape, axis: int) -> ValueForm:
        """Arrays of one shape, along a new ``axis``."""
        one = (*shape[:axis], 1, *shape[axis + 1 :])
        return self.concatenate([self.reshape(each, one) for each in parts], shape)

    def concatenate(self, parts: Sequence[ValueForm], shape: Shape) -> ValueForm:
        """An array with elements of each of the ``parts``."""
        numbers = {each.number for each in parts}
        number = numbers.pop() if len(numbers) == 1 else None
        return replace(self.arithmetic("add", parts, shape), number=number)

    def select(self, operands: Sequence[ValueForm], shape: Shape) -> ValueForm:
        """By a condition, elements of one array if it is false, or of another; of numbers it is known which, as of the
        divisor of Keras' ``divide_no_nan``.
        """
        condition, if_false, if_true = operands
        if condition.number is not None:
            return self.concatenate([if_true if condition.number else if_false], shape)
        if condition.axis is None:
            return self.concatenate([if_false, if_true], shape)
        return self.apply(operands, shape)

    def reshape(self, value: ValueForm, shape: Shape) -> ValueForm:
        """The same elements, in their order."""
        if value.axis is None:
            return replace(value, shape=shape)
        length, before = value.shape[value.axis], _product(value.shape[: value.axis])
        exact = [axis for axis, each in enumerate(shape) if each == length]
        several = [axis for axis, each in enumerate(shape) if self._is_multiple(each)]
        placed = [axis for axis in (*exact, *several) if _product(shape[:axis]) == before]
        found = (*placed, *exact, *several)
        return replace(value, shape=shape, axis=found[0]) if found else ValueForm(shape, frozenset())

    def broadcast(self, value: ValueForm, shape: Shape, axes: Sequence[int]) -> ValueForm:
        """The same elements, repeated along new axes; ``axes`` are those of the value in the new ``shape``."""
        if value.axis is not None:
            return replace(value, shape=shape, axis=axes[value.axis])
        new = self._new_axis(shape, [each for each in range(len(shape)) if each not in axes])
        return replace(value, shape=shape, axis=new)

    def arithmetic(self, operation: str, operands: Sequence[ValueForm], shape: Shape) -> ValueForm:
        """``add``, ``sub``, ``mul`` or ``div``, element by element."""
        # The last axes of the operands are those of the result.
        axis = min(
            (len(shape) - len(each.shape) + each.axis for each in operands if each.axis is not None), default=None
        )
        if operation in ("mul", "div"):
            dividend, divisor = operands
            if operation == "div" and dividend.averaged is not None and divisor.number == dividend.averaged[0]:
                return ValueForm(shape, dividend.averaged[1], axis)
            sign, pairs = 1, itertools.product(self._factor(dividend), self._factor(divisor))
            if operation == "div":
                sign, pairs = -1, itertools.product(dividend.forms, self._divisor(divisor))
            forms = frozenset(
                Form(a.degree + sign * b.degree, _kind_of_product(a, b, dividend, divisor, operation)) for a, b in pairs
            )
        else:
            parts = [each for each in operands if each.number != 0] or operands
            # A row with a mean of all is a function of each row, as in normalizations; a mean with another is none.
            highest = Dependence.OTHER if axis is None else Dependence.LINEAR
            if axis is not None and not all(each.shape or _is_mean(each) for each in parts):
                return ValueForm(shape, frozenset((_OTHER,)), axis)

            def add(first: frozenset[Form], second: frozenset[Form]) -> frozenset[Form]:
                pairs = [(a, b) for a, b in itertools.product(first, second) if a.degree == b.degree]
                return frozenset(
                    Form(a.degree, max(a.kind, b.kind) if Dependence.OTHER not in (a.kind, b.kind) else highest)
                    for a, b in pairs
                )

            forms = functools.reduce(add, [each.forms for each in parts])
        return ValueForm(shape, forms, axis, _folded(operation, operands))

    def reduce(self, value: ValueForm, axes: Iterable[int], shape: Shape, *, mean: bool = False) -> ValueForm:
        """The sum or the mean over ``axes``."""
        over = {axis % len(value.shape) for axis in axes} if value.shape else set()
        lengths = [value.shape[axis] for axis in over]
        count = None if None in lengths else math.prod(each for each in lengths if each is not None)
        summed, axis, number = value.forms, value.axis, value.number
        if axis in over:
            summed, axis, number = frozenset(Form(each.degree + 1, each.kind) for each in summed), None, None
        elif axis is not None and len(shape) < len(value.shape):
            axis -= sum(each < axis for each in over)
        if mean:
            return ValueForm(shape, value.forms, axis, value.number)
        number = number * count if number is not None and count is not None else None
        return ValueForm(shape, summed, axis, number, None if count is None else (float(count), value.forms))

    def contract(
        self, operands: Sequence[ValueForm], names: Sequence[Sequence[Any]], made: Sequence[Any], shape: Shape
    ) -> ValueForm:
        """The sum of products over the axes whose ``names``, as in ``einsum``, are not among those ``made``."""
        of_rows = [own[value.axis] for value, own in zip(operands, names, strict=True) if value.axis is not None]
        kept = [made.index(name) for name in of_rows if name in made]
        # Of rows with rows, as in attention, there is one result for each: a function of rows.
        is_summed = bool(of_rows) and not kept
        first, second = operands
        forms = frozenset(
            Form(a.degree + b.degree + is_summed, _kind_of_product(a, b, first, second, "mul"))
            for a, b in itertools.product(first.forms, second.forms)
        )
        return ValueForm(shape, forms, kept[0] if kept else None)

    def apply(self, operands: Sequence[ValueForm], shape: Shape, over: Collection[int] = ()) -> ValueForm:
        """Any other function, which reduces the axes ``over``, if any."""
        of_rows = [each for each in operands if each.axis is not None]
        if any(each.axis in over and _same_axis(each, shape) != each.axis for each in of_rows):
            return ValueForm(shape, frozenset((_OTHER,)))
        possible = [[form for form in each.forms if form.degree == 0] for each in operands]
        is_known, forms = all(possible), list(itertools.chain(*possible))
        if not of_rows and is_known:
            is_number = all(form.kind is Dependence.NUMBER for form in forms)
            return ValueForm(shape, frozenset((CONSTANT if is_number else _OTHER,)))
        axis = next((axis for axis in (_same_axis(each, shape) for each in of_rows) if axis is not None), None)
        if axis is None:  # something of the batch that has as many elements as there are rows is one of rows
            axis = self._new_axis(shape, range(len(shape)))
            is_known = axis is not None
        if not is_known:
            return ValueForm(shape, frozenset(), axis)
        kinds = [form.kind for each in of_rows for form in each.forms if form.degree == 0]
        return ValueForm(shape, frozenset((Form(0, max(kinds, default=Dependence.LINEAR)),)), axis)

    def _new_axis(self, shape: Shape, axes: Iterable[int]) -> int | None:
        """The first of ``axes`` that may be one of rows; a length of 1 has other reasons."""
        lengths = ((axis, shape[axis]) for axis in axes)
        return next((axis for axis, each in lengths if each is None or (each > 1 and each in self._rows)), None)

    def _is_multiple(self, length: int | None) -> bool:
        """Whether an axis may be one of rows, or of several values of each."""
        return length is None or any(length > 0 and length % rows == 0 for rows in self._rows)

    def _divisor(self, value: ValueForm) -> frozenset[Form]:
        """The forms of a divisor: a number that is a multiple of that of the rows may be one of elements."""
        number = value.number
        if number is None or number < 1:
            return value.forms
        if number in self._rows:
            return frozenset((COUNT,) if number > _USUAL else (COUNT, CONSTANT))
        is_multiple = any(rows > 1 and number % rows == 0 for rows in self._rows)
        return frozenset((COUNT, CONSTANT)) if is_multiple else value.forms

    def _factor(self, value: ValueForm) -> frozenset[Form]:
        """The forms of a factor: it may be the number of rows, or one divided by it."""
        for rows in self._rows if value.number else ():
            for number, form in ((float(rows), COUNT), (1 / rows, Form(-1, Dependence.NUMBER))):
                if rows > 1 and value.number is not None and math.isclose(value.number, number, rel_tol=1e-6):
                    return frozenset((form, CONSTANT))
        return value.forms


def _kind_of_product(a: Form, b: Form, first: ValueForm, second: ValueForm, operation: str) -> Dependence:
    """Of ``a * b`` or ``a / b``. Each row with a mean over all is a function of each row: so are normalizations."""
    if first.axis is None and second.axis is None:
        if operation == "div":
            return a.kind if b.kind is Dependence.NUMBER else Dependence.OTHER
        return max(a.kind, b.kind) if Dependence.NUMBER in (a.kind, b.kind) else Dependence.OTHER
    kinds = (_kind_beside_rows(form) if each.axis is None else form.kind for form, each in ((a, first), (b, second)))
    return max(kinds)


def _is_mean(value: ValueForm) -> bool:
    """Whether a number may be a mean over the rows, or not depend on them."""
    return any(each.degree == 0 and each.kind is not Dependence.OTHER for each in value.forms)


def _kind_beside_rows(form: Form) -> Dependence:
    is_sum = form.degree != 0 and form.kind is not Dependence.NUMBER
    return Dependence.OTHER if is_sum else min(form.kind, Dependence.LINEAR)


def _folded(operation: str, operands: Sequence[ValueForm]) -> float | None:
    numbers = [each.number for each in operands if each.number is not None]
    if len(numbers) < len(operands) or (operation == "div" and not numbers[1]):
        return None
    return functools.reduce(_OPERATORS[operation], numbers)


def _same_axis(value: ValueForm, shape: Shape) -> int | None:
    """Where the rows of ``value`` probably are in a result: where they were, or where there are as many."""
    if value.axis is None:
        return None
    length = value.shape[value.axis]
    places = (value.axis, value.axis + len(shape) - len(value.shape), *range(len(shape)))
    return next((axis for axis in places if 0 <= axis < len(shape) and shape[axis] == length), None)


def _product(lengths: Iterable[int | None]) -> int | None:
    known = list(lengths)
    return None if None in known else math.prod(each for each in known if each is not None)
