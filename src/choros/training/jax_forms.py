"""How losses in JAX depend on the rows (``forms.py``), read from the program that computes them; gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from choros.comm.request import is_users
from choros.training.forms import COMPARISONS, MEAN, Form, Reading, ValueForm

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
    return _ReadProgram(loss, rows).result.total


def forms_of_marked(program: LossProgram, rows: frozenset[int]) -> dict[str, Form | None]:
    """The forms of the values that a program marks, by their names."""
    return _ReadProgram(program, rows).marked


def differentiation(factor_of: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """What to replace so that gradients of a program are multiplied by ``factor_of`` it, if there is a factor."""

    def scaling(own: Callable[..., Any], *, with_value: bool) -> Callable[..., Any]:
        def differentiate(function: Any, argnums: Any = 0, has_aux: bool = False, *args: Any, **kwargs: Any) -> Any:
            differentiated = own(function, argnums, has_aux, *args, **kwargs)
            weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)

            def call(*given: Any, **named: Any) -> Any:
                result = differentiated(*given, **named)
                factor = factor_of(LossProgram(function, given, named, weights))
                if factor is None:
                    return result
                gradients = result[1] if with_value else result[0] if has_aux else result
                scaled = jax.tree.map(lambda each: each * factor.astype(each.dtype), gradients)
                return (result[0], scaled) if with_value else (scaled, result[1]) if has_aux else scaled

            return call

        return differentiate

    value_and_grad = scaling(jax.value_and_grad, with_value=True)
    return jax, {"value_and_grad": value_and_grad, "grad": scaling(jax.grad, with_value=False)}


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
        traced = jax.make_jaxpr(lambda arguments: program.function(*arguments, **program.named))(program.arguments)
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
