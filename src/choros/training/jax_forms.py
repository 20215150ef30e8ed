"""How losses in JAX depend on the rows, read from the program that computes them: see ``forms.py``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from choros.comm.request import is_users
from choros.training.forms import MEAN, Form, Reading, ValueForm

_KNOWN, _NUMBERED = "choros", "choros: "
_SAME = frozenset(("convert_element_type", "copy", "neg", "optimization_barrier", "reduce_precision", "stop_gradient"))
_ARITHMETIC = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div"}
_RANDOM = frozenset(("random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"))
#: Calls of programs, whose values are read in there.
_CALLS = frozenset(
    ("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat", "remat2")
)
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@final
@dataclass(frozen=True)
class LossProgram:
    """A function that returns a loss, or a tuple that begins with one, its arguments, and which of them are weights."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[int, ...] = ()


def mark_known(tensor: Any) -> Any:
    """Marks a loss that is one of all ranks already."""
    return checkpoint_name(tensor, _KNOWN)


def mark(tensor: Any, name: str) -> Any:
    """Marks a value, for ``forms_of_marked``."""
    return checkpoint_name(tensor, _NUMBERED + name)


def line_of(loss: Any) -> str | None:
    """``file:line`` of the function."""
    code = getattr(getattr(loss, "function", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and is_users(code.co_filename) else None


def total(loss: Any, rows: frozenset[int]) -> Form | None:
    """The form of the loss that a program returns."""
    if not isinstance(loss, LossProgram):
        return None
    result = _ReadProgram(loss, rows).result
    return result.total


def forms_of_marked(program: LossProgram, rows: frozenset[int]) -> dict[str, Form | None]:
    """The forms of the values that a program marks, by their names."""
    return _ReadProgram(program, rows).marked


@final
class _ReadProgram:
    """A program that ``jax`` traces, and does not run: the forms of its first result, and of values that it marks."""

    def __init__(self, program: LossProgram, rows: frozenset[int]) -> None:
        self._reading = Reading(rows)
        self.marked: dict[str, Form | None] = {}
        traced = jax.make_jaxpr(lambda arguments: program.function(*arguments, **program.named))(program.arguments)
        numbered = [position for position, each in enumerate(program.arguments) for _ in jax.tree.leaves(each)]
        given = [
            ValueForm(each.aval.shape) if position in program.weights else self._reading.leaf(each.aval.shape)
            for each, position in zip(traced.jaxpr.invars, numbered, strict=True)
        ]
        closed_over = [self._reading.leaf(each.aval.shape) for each in traced.jaxpr.constvars]
        self.result = self._run(traced.jaxpr, given, closed_over)[0]

    def _run(self, jaxpr: Any, given: Sequence[ValueForm], closed_over: Sequence[ValueForm]) -> list[ValueForm]:
        values: dict[Any, ValueForm] = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*given, *closed_over), strict=True))

        def value_of(atom: Any) -> ValueForm:
            if not hasattr(atom, "val"):
                return values[atom]
            return ValueForm(atom.aval.shape, number=float(atom.val) if np.ndim(atom.val) == 0 else None)

        for each in jaxpr.eqns:
            results = self._step(each, [value_of(atom) for atom in each.invars])
            values.update(zip(each.outvars, results, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _step(self, equation: Any, operands: list[ValueForm]) -> list[ValueForm]:
        """The results of one operation."""
        name, parameters = equation.primitive.name, equation.params
        inner = next((parameters[each] for each in _INNER if name in _CALLS and each in parameters), None)
        if inner is not None:
            jaxpr = getattr(inner, "jaxpr", inner)
            given = operands[len(operands) - len(jaxpr.invars) :]
            return self._run(jaxpr, given, [self._reading.leaf(each.aval.shape) for each in jaxpr.constvars])
        shapes = [getattr(each.aval, "shape", ()) for each in equation.outvars]
        if len(shapes) == 1:
            return [self._result(name, parameters, operands, shapes[0])]
        return [self._other(name, parameters, operands, each) for each in shapes]

    def _result(self, name: str, parameters: Mapping[str, Any], operands: list[ValueForm], shape: Any) -> ValueForm:
        reading, first = self._reading, operands[0] if operands else ValueForm(())
        if name == "name":
            marked = parameters["name"].removeprefix(_NUMBERED)
            if marked == parameters["name"] != _KNOWN:
                return first
            if marked != _KNOWN:
                self.marked.setdefault(marked, first.total)
            return ValueForm(shape, frozenset((MEAN,)))  # what it will be
        if name in _SAME:
            return reading.same(first, shape, first.axis)
        if name in _ARITHMETIC:
            return reading.arithmetic(_ARITHMETIC[name], operands, shape)
        if name == "square" or (name == "integer_pow" and parameters["y"] == 2):
            return reading.arithmetic("mul", [first, first], shape)
        if name == "select_n" and operands[0].axis is None:
            return reading.arithmetic("add", operands[1:], shape)
        if name == "concatenate":
            return reading.arithmetic("add", operands, shape)
        if name == "stack":
            place = parameters["axis"]
            parts = [reading.reshape(each, (*shape[:place], 1, *shape[place + 1 :])) for each in operands]
            return reading.arithmetic("add", parts, shape)
        if name in ("reshape", "squeeze", "expand_dims"):
            return reading.reshape(first, shape)
        if name == "transpose":
            axis = None if first.axis is None else parameters["permutation"].index(first.axis)
            return reading.same(first, shape, axis)
        if name == "broadcast_in_dim":
            return reading.broadcast(first, shape, parameters["broadcast_dimensions"])
        if name == "reduce_sum":
            return reading.reduce(first, parameters["axes"], shape)
        if name == "dot_general":
            return self._product(parameters["dimension_numbers"], operands, shape)
        return self._other(name, parameters, operands, shape)

    def _product(self, numbers: Any, operands: list[ValueForm], shape: Any) -> ValueForm:
        """``dot_general``: the result has the axes that both share, then those of the first, then of the second."""
        over, shared = numbers
        free = [
            [axis for axis in range(len(each.shape)) if axis not in (*summed, *both)]
            for each, summed, both in zip(operands, over, shared, strict=True)
        ]
        places, after = [], len(shared[0])
        for each, both, own in zip(operands, shared, free, strict=True):
            order = {axis: place for place, axis in enumerate(both)} | {a: after + i for i, a in enumerate(own)}
            places.append([order.get(axis, -1) for axis in range(len(each.shape))])
            after += len(own)
        return self._reading.contract(operands, over, places, shape)

    def _other(self, name: str, parameters: Mapping[str, Any], operands: list[ValueForm], shape: Any) -> ValueForm:
        if name in _RANDOM:
            return self._reading.made(shape, random=True)
        axes = parameters.get("axes", ()) if name.startswith(("reduce_", "arg")) else ()
        return self._reading.apply(operands, shape, axes)
