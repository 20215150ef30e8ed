"""How losses in JAX depend on the rows (``forms.py``), read from the program that computes them; gradients."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from choros.comm.request import is_users
from choros.training.forms import COMPARISONS, MEAN, Form, Reading, ValueForm
from choros.training.thread import doing, thread

_KNOWN, _NUMBERED = "choros", "choros: "
_SAME = ("convert_element_type", "copy", "neg", "optimization_barrier", "reduce_precision", "stop_gradient")
#: The rules of ``Reading.follow``.
_RULES = {
    **dict.fromkeys(_SAME, "same"),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), "reshape"),
    **dict.fromkeys(("add", "add_any"), "add"),
    **{name: name for name in ("concatenate", "sub", "mul", "div", "square", *COMPARISONS)},
    "select_n": "select",
}
_RANDOM = frozenset(("random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"))
#: Calls of programs, whose values are read in there.
_CALLS = frozenset(
    ("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat", "remat2")
)
#: Prime numbers that seldom divide the number of anything else; and how many of these parts a step's rows have.
_UNUSUAL, _PARTS = (29, 31, 37, 41, 43, 47, 53, 59), 8


@final
@dataclass(frozen=True)
class LossProgram:
    """A function that returns a loss, or a tuple that begins with one, its arguments, and which of them are weights."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
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
    return _ReadProgram(loss, rows).result.total


def forms_of_marked(program: LossProgram, rows: frozenset[int]) -> dict[str, Form | None]:
    """The forms of the values that a program marks, by their names."""
    return _ReadProgram(program, rows).marked


def with_other_rows(arguments: Sequence[Any], rows: frozenset[int]) -> tuple[tuple[Any, ...], frozenset[int]]:
    """A step's arguments, of which the last one is the batch, as if this had other ``rows``; and the numbers that these
    and their parts (halves, …) have: what nothing else should have, the same on all ranks.
    """
    shapes = [each.shape for each in jax.tree.leaves(arguments[:-1])]
    shapes += [each.shape[1:] for each in jax.tree.leaves(arguments[-1])]
    free = (each for each in _UNUSUAL if all(length % each or not length for shape in shapes for length in shape))
    others = dict(zip(sorted(rows), free, strict=False))

    def with_rows(leaf: Any) -> Any:
        length, *rest = leaf.shape or (None,)
        return jax.ShapeDtypeStruct((_PARTS * others[length], *rest), leaf.dtype) if length in others else leaf

    numbers = [part * each for each in others.values() for part in (1, 2, 4, _PARTS)]
    return (*arguments[:-1], jax.tree.map(with_rows, arguments[-1])), frozenset(numbers or rows)


def differentiation(factor_of: Callable[[Any], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """What to replace so that gradients of a program are multiplied by ``factor_of`` it, if there is a factor: what
    functions call that ``jax.grad`` and ``jax.value_and_grad`` have returned, whenever that was.
    """
    api: Any = sys.modules[jax.vjp.__module__]
    name = "_vjp" if hasattr(api, "_vjp") else "vjp"  # in older versions, jax.vjp calls it, too
    own = getattr(api, name)

    def vjp(function: Any, *given: Any, **options: Any) -> Any:
        if thread.differentiating:
            return own(function, *given, **options)
        factor = None
        with doing("differentiating"):
            loss, pull, *others = own(function, *given, **options)
            if getattr(loss, "shape", None) == ():
                called = getattr(function, "call_wrapped", function)
                factor = factor_of(LossProgram(called, given, weights=tuple(range(len(given)))))
        return loss, pull if factor is None else jax.tree_util.Partial(_scaled, pull, factor), *others

    return [(api, {name: vjp}), *([(jax, {name: vjp})] if name == "vjp" else [])]


def _scaled(pull: Any, factor: Any, gradient: Any) -> Any:
    with doing("differentiating"):
        return pull(gradient * factor.astype(gradient.dtype))


def called_by(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The program that an operation calls with its last arguments, and its constants; ``None`` if it calls none."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr") if equation.primitive.name in _CALLS else ()
    inner = next((equation.params[each] for each in names if each in equation.params), None)
    return None if inner is None else (getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()))


@final
class _ReadProgram:
    """A program that ``jax`` traces, and does not run: the forms of its first result, and of values that it marks."""

    def __init__(self, program: LossProgram, rows: frozenset[int]) -> None:
        self._reading = Reading(rows)
        self.marked: dict[str, Form | None] = {}
        traced = jax.make_jaxpr(lambda arguments: program.function(*arguments))(program.arguments)
        numbered = [position for position, each in enumerate(program.arguments) for _ in jax.tree.leaves(each)]
        given = [
            ValueForm(each.aval.shape) if position in program.weights else self._reading.leaf(each.aval.shape)
            for each, position in zip(traced.jaxpr.invars, numbered, strict=True)
        ]
        closed_over = [self._reading.leaf(each.aval.shape) for each in traced.jaxpr.constvars]
        self.result: ValueForm = self._run(traced.jaxpr, given, closed_over)[0]

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
        name, parameters = equation.primitive.name, equation.params
        if (called := called_by(equation)) is not None:
            jaxpr, _ = called
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
        if name in _RULES:
            return reading.follow(_RULES[name], operands, shape)
        if name == "integer_pow" and parameters["y"] == 2:
            return reading.follow("square", operands, shape)
        if name == "stack":
            return reading.stack(operands, shape, parameters["axis"])
        if name == "transpose":
            return reading.transpose(first, shape, parameters["permutation"])
        if name == "broadcast_in_dim":
            return reading.broadcast(first, shape, parameters["broadcast_dimensions"])
        if name == "reduce_sum":
            return reading.reduce(first, parameters["axes"], shape)
        if name == "dot_general":
            return self._product(parameters["dimension_numbers"], operands, shape)
        return self._other(name, parameters, operands, shape)

    def _product(self, numbers: Any, operands: list[ValueForm], shape: Any) -> ValueForm:
        """``dot_general``: the result has the axes that both share, then those of the first, then of the second."""
        first, second = ([(number, axis) for axis in range(len(each.shape))] for number, each in enumerate(operands))
        for pairs in numbers:
            for axis, other in zip(*pairs, strict=True):
                second[other] = first[axis]
        summed, shared = ([first[axis] for axis in pairs[0]] for pairs in numbers)
        free = [name for name in (*first, *second) if name not in (*summed, *shared)]
        return self._reading.contract(operands, [first, second], [*shared, *free], shape)

    def _other(self, name: str, parameters: Mapping[str, Any], operands: list[ValueForm], shape: Any) -> ValueForm:
        if name in _RANDOM:
            return self._reading.made(shape, random=True)
        axes = parameters.get("axes", ()) if name.startswith(("reduce_", "arg")) else ()
        return self._reading.apply(operands, shape, axes)
