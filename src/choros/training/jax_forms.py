"""How a loss in JAX depends on the rows, read from the program that computes it: see ``forms.py``.

A compiled step has shapes without names: the rows are found by their number, in what depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from choros.comm.request import is_users
from choros.training.forms import CONSTANT, COUNT, MEAN, SUM, Dependence, Form, Term, is_of_rows, reduces_rows

__all__ = ["LossProgram", "is_readable", "line_of", "mark_known", "reader"]

_KNOWN = "choros"
#: A divisor that is a multiple of the number of rows is their number, if that is not a usual constant.
_USUAL = 4
_SAME = frozenset(
    ("broadcast_in_dim", "convert_element_type", "copy", "neg", "reduce_precision", "reshape", "squeeze", "transpose")
)
_ADD = frozenset(("add", "add_any", "concatenate", "stack", "sub"))
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@final
@dataclass(frozen=True)
class LossProgram:
    """A function that returns a loss, or a tuple of which a loss is the first, and its arguments.

    Attributes:
        function: the function.
        arguments: its positional arguments.
        named: the others.
        weights: the positions of those arguments that are weights.
        closes_over_batch: whether it may use arrays of the batch that are no arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    closes_over_batch: bool = True


def is_readable(loss: Any) -> bool:
    """Whether ``loss`` is the program that computes it: a value does not know that."""
    return isinstance(loss, LossProgram)


def mark_known(tensor: Any) -> Any:
    """Marks a loss that is one of all ranks already."""
    return checkpoint_name(tensor, _KNOWN)


def line_of(loss: Any) -> str | None:
    """``file:line`` of the function."""
    code = getattr(getattr(loss, "function", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and is_users(code.co_filename) else None


def reader(rows: int) -> Callable[[Any], Form | Term | None]:
    """Returns the function ``read`` of ``form_of`` for programs, and for the values in them.

    Args:
        rows: the number of rows of the batch.
    """

    def read(value: Any) -> Form | Term | None:
        if isinstance(value, Form):
            return value
        if isinstance(value, LossProgram):
            value = _loss_of(value, rows)
        if not isinstance(value, _Operand):
            return None
        return value.read(rows)

    return read


@final
@dataclass(frozen=True)
class _Frame:
    """A program, or one that it calls."""

    made_by: Mapping[Any, Any]
    given: Mapping[Any, _Operand]
    of_batch: frozenset[Any]


@final
@dataclass(frozen=True)
class _Operand:
    """A value of a program."""

    atom: Any
    frame: _Frame | None

    @property
    def of_batch(self) -> bool:
        return self.frame is not None and not hasattr(self.atom, "val") and self.atom in self.frame.of_batch

    def has_rows(self, rows: int) -> bool:
        """Whether it has an axis of rows."""
        return any(is_of_rows(each, rows) for each in self.atom.aval.shape) and self.keeps_rows(rows)

    def keeps_rows(self, rows: int) -> bool:
        """Whether it is something of the batch, whose rows are not reduced yet."""
        if not self.of_batch or self.frame is None:
            return False
        if self.atom in self.frame.given:
            return self.frame.given[self.atom].keeps_rows(rows)
        made = self.made
        if made is None:
            return True
        operands = [_Operand(each, self.frame) for each in made.invars]
        if made.primitive.name == "reduce_sum" and reduces_rows(operands[0].atom.aval.shape, made.params["axes"], rows):
            return False
        inner = self.inner()
        return any(each.keeps_rows(rows) for each in operands) if inner is None else inner.keeps_rows(rows)

    def inner(self) -> _Operand | None:
        """The same value in the program that is called for it, if one is."""
        program = next((self.made.params[each] for each in _INNER if each in self.made.params), None)
        if program is None:
            return None
        jaxpr = getattr(program, "jaxpr", program)
        operands = [_Operand(each, self.frame) for each in self.made.invars]
        given = dict(zip(jaxpr.invars, operands[-len(jaxpr.invars) :], strict=True)) if jaxpr.invars else {}
        frame = _frame(jaxpr, given, [each for each, value in given.items() if value.of_batch])
        return _Operand(jaxpr.outvars[self.made.outvars.index(self.atom)], frame)

    def read(self, rows: int) -> Form | Term | None:
        """The form or the last step, for ``form_of``."""
        if self.frame is None or not self.of_batch:
            return CONSTANT
        if self.has_rows(rows):
            return None
        if self.atom in self.frame.given:
            return self.frame.given[self.atom].read(rows)
        made = self.frame.made_by.get(self.atom)
        if made is None:
            return CONSTANT  # a number of the batch that is none of its rows
        name, operands = made.primitive.name, [_Operand(each, self.frame) for each in made.invars]
        if (inner := self.inner()) is not None:
            return inner.read(rows)
        if name == "name":
            return MEAN if made.params["name"] == _KNOWN else Term("add", operands)
        if any(each.has_rows(rows) for each in operands):
            return SUM if name in ("reduce_sum", "dot_general") else None
        if name == "div" and operands[1].constant() == operands[0].summed():
            return MEAN if operands[0].read(rows) == SUM else Term("add", operands[:1])
        if name in ("mul", "div"):
            forms = [_counted(each, rows) for each in operands]
            return None if None in forms else Term("multiply" if name == "mul" else "divide", forms)
        if name in _SAME or name == "reduce_sum":
            return Term("add", operands[:1])
        if name in _ADD or (name == "select_n" and not operands[0].of_batch):
            return Term("add", [each for each in operands[name == "select_n" :] if each.constant() != 0])
        if name in ("square", "integer_pow"):
            twice = name == "square" or made.params["y"] == 2
            return Term("multiply", operands * 2) if twice else Term("apply", operands)
        return Term("apply", operands)

    @property
    def made(self) -> Any:
        """The operation whose result it is, if there is one here."""
        return None if self.frame is None or hasattr(self.atom, "val") else self.frame.made_by.get(self.atom)

    def summed(self) -> float:
        """How many values of each element it is the sum of; -1 if it is none."""
        if self.made is None or self.made.primitive.name != "reduce_sum":
            return -1.0
        return float(np.prod([self.made.invars[0].aval.shape[axis] for axis in self.made.params["axes"]]))

    def constant(self) -> float | None:
        """The number that it is, where the program says so."""
        if hasattr(self.atom, "val"):
            return float(self.atom.val) if np.ndim(self.atom.val) == 0 else None
        if self.made is None or self.made.primitive.name not in _SAME:
            return None
        return _Operand(self.made.invars[0], self.frame).constant()


def _loss_of(program: LossProgram, rows: int) -> _Operand:
    """The loss in the program that ``jax`` traces, which is not run."""
    traced = jax.make_jaxpr(lambda arguments: program.function(*arguments, **program.named))(program.arguments)
    numbered = [position for position, each in enumerate(program.arguments) for _ in jax.tree.leaves(each)]
    jaxpr = traced.jaxpr
    batch = [each for each, position in zip(jaxpr.invars, numbered, strict=True) if position not in program.weights]
    of_batch = [
        each
        for each in (*batch, *(jaxpr.constvars if program.closes_over_batch else ()))
        if any(is_of_rows(length, rows) for length in each.aval.shape)
    ]
    return _Operand(jaxpr.outvars[0], _frame(jaxpr, {}, of_batch))


def _frame(jaxpr: Any, given: Mapping[Any, _Operand], of_batch: list[Any]) -> _Frame:
    found = set(of_batch)
    for each in jaxpr.eqns:
        if any(not hasattr(atom, "val") and atom in found for atom in each.invars):
            found.update(each.outvars)
    return _Frame({out: each for each in jaxpr.eqns for out in each.outvars}, given, frozenset(found))


def _counted(value: _Operand, rows: int) -> Any:
    """A factor or a divisor, which may be the number of rows."""
    constant = value.constant()
    if constant is None or constant <= 0:
        return value if constant is None else CONSTANT
    for number, form in ((constant, COUNT), (1 / constant, Form(-1, Dependence.NUMBER))):
        if rows > 0 and number >= rows and abs(number / rows - round(number / rows)) < 1e-6:
            return form if rows > _USUAL else None
    return CONSTANT
