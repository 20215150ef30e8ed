"""How a loss in TensorFlow's graph depends on the rows (``forms.py``), whose number it seldom knows; gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import tensorflow as tf

from choros.comm.request import is_users
from choros.training.forms import CONSTANT, COUNT, MEAN, Dependence, Form, Reading, ValueForm

_KNOWN, _READINGS = "_choros_known", "_choros_readings"
_SAME = ("Cast", "CheckNumerics", "EnsureShape", "Identity", "Neg", "PreventGradient", "Snapshot", "StopGradient")
#: The rules of ``Reading.follow``.
_RULES = {
    **dict.fromkeys(_SAME, "same"),
    **dict.fromkeys(("ExpandDims", "Reshape", "Squeeze"), "reshape"),
    **dict.fromkeys(("Add", "AddN", "AddV2"), "add"),
    **dict.fromkeys(("ConcatV2", "Pack"), "concatenate"),
    **dict.fromkeys(("Div", "DivNoNan", "RealDiv"), "div"),
    **dict.fromkeys(("Mul", "MulNoNan"), "mul"),
    "Equal": "eq",
    "Greater": "gt",
    "GreaterEqual": "ge",
    "Less": "lt",
    "LessEqual": "le",
    "NotEqual": "ne",
    "Square": "square",
    "Sub": "sub",
}
_REDUCTIONS = frozenset(("All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Min", "Prod"))
_PRODUCTS = frozenset(("BatchMatMulV2", "BatchMatMulV3", "MatMul"))
_ONE = ValueForm((), number=1.0)
_OF_LENGTHS = frozenset(("GatherV2", "Prod", "Size", "StridedSlice", "Unpack"))
#: What has values of its own, but not of the batch.
_WEIGHTS = frozenset(("ReadVariableOp", "VarHandleOp", "VariableV2"))


def mark_known(tensor: Any) -> Any:
    """Marks a loss that is one of all ranks already."""
    if tf.is_symbolic_tensor(tensor):
        tensor.graph.get_collection_ref(_KNOWN).append(tensor.name)
    else:
        setattr(tensor, _KNOWN, True)
    return tensor


def line_of(loss: Any) -> str | None:
    """``file:line`` of the user's code that has computed ``loss``; ``None`` outside of graphs."""
    if not tf.is_symbolic_tensor(loss):
        return None
    lines = [(frame.filename, frame.lineno) for frame in loss.op.traceback]
    return next((f"{name}:{line}" for name, line in reversed(lines) if is_users(name)), None)


def total(loss: Any, rows: frozenset[int]) -> Form | None:
    """The form of a loss, or of losses' sum, ``None`` if unknown; outside of graphs only a marked one is known."""
    if not tf.is_symbolic_tensor(loss):
        return MEAN if hasattr(loss, _KNOWN) else None
    readings = loss.graph.get_collection_ref(_READINGS)
    if not readings:
        readings.append(_Graph(loss.graph, rows))
    value: ValueForm = readings[0].value_of(loss)
    return value.total


def differentiation(factor_of: Callable[[Any], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """What to replace so that weights' gradients of a tensor are multiplied by ``factor_of(tensor)``, if any."""
    own = tf.GradientTape.gradient

    def scaled(target: Any, given: Any) -> Any:
        factor = factor_of(target)
        if factor is None:
            return given
        return (tf.ones_like(target) if given is None else given) * tf.cast(factor, target.dtype)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def gradient(
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        if any(hasattr(each, "assign") for each in tf.nest.flatten(sources)):  # not a penalty on the inputs' gradient
            target = tf.nest.flatten(target)
            given = [None] * len(target) if output_gradients is None else tf.nest.flatten(output_gradients)
            seeds = [scaled(*pair) for pair in zip(target, given, strict=True)]
            output_gradients = None if all(each is None for each in seeds) else seeds
        return own(tape, target, sources, output_gradients, unconnected_gradients)

    return [(tf.GradientTape, {"gradient": gradient})]


@final
class _Graph:
    """What is known of the tensors of a graph, in the order in which they were added to it."""

    def __init__(self, graph: Any, rows: frozenset[int]) -> None:
        self._graph = graph
        self._reading = Reading(rows)
        self._values: dict[str, ValueForm] = {}
        self._read = 0

    def value_of(self, tensor: Any) -> ValueForm:
        """What is known of a tensor."""
        operations = self._graph.get_operations()
        known = frozenset(self._graph.get_collection_ref(_KNOWN))
        for each in operations[self._read :]:
            operands = [self._value(given, known) for given in each.inputs]
            self._values.update({made.name: self._result(each, operands, made, _shape(made)) for made in each.outputs})
        self._read = len(operations)
        return self._value(tensor, known)

    def _value(self, tensor: Any, known: frozenset[str]) -> ValueForm:
        if tensor.name in known:
            return ValueForm(_shape(tensor), frozenset((MEAN,)))
        return self._values.get(tensor.name, ValueForm(()))

    def _result(self, operation: Any, operands: list[ValueForm], made: Any, shape: tuple[int | None, ...]) -> ValueForm:
        kind, reading = operation.type, self._reading
        if kind == "Const":
            return ValueForm(shape, number=_constant(made))
        if kind in _WEIGHTS or made.dtype == tf.resource:
            return ValueForm(shape)
        if kind in ("Placeholder", "IteratorGetNext"):
            return reading.leaf(shape)
        if kind.startswith(("Random", "StatelessRandom", "StatelessTruncated", "Truncated")):
            return reading.made(shape, random=True)
        if kind in ("BroadcastTo", "Fill"):
            filled = operands[kind == "Fill"]
            return reading.broadcast(filled, shape, range(len(shape) - len(filled.shape), len(shape)))
        if kind == "Shape" or (kind == "Pack" and made.dtype.is_integer and _are_numbers(operands)):
            return ValueForm(shape)  # a shape, as that of what Conv2DTranspose makes
        length = self._length(made, operands, shape) if kind in _OF_LENGTHS else None
        if length is not None:
            return length
        if kind in ("Slice", "StridedSlice") and _are_numbers(operands[1:]):
            return reading.apply(operands[:1], shape)  # by numbers of rows, such as that of the first of two batches
        if kind in ("Select", "SelectV2"):
            condition, if_true, if_false = operands
            return reading.select([condition, if_false, if_true], shape)
        if kind in _RULES:
            return reading.follow(_RULES[kind], operands[:-1] if kind == "ConcatV2" else operands, shape)
        return self._reduced(operation, operands, shape)

    def _reduced(self, operation: Any, operands: list[ValueForm], shape: tuple[int | None, ...]) -> ValueForm:
        kind, reading = operation.type, self._reading
        if kind == "L2Loss":
            squares = reading.follow("square", operands, operands[0].shape)
            return reading.reduce(squares, range(len(squares.shape)), shape)
        if kind in ("Sum", "Mean") or kind in _REDUCTIONS:
            axes = _axes(operation, len(operands[0].shape), len(shape))
            if kind in _REDUCTIONS or axes is None:
                return reading.apply(operands[:1], shape, axes or ())
            return reading.reduce(operands[0], axes, shape, mean=kind == "Mean")
        if kind == "Transpose":
            order = tf.get_static_value(operation.inputs[1])
            if order is not None:
                return reading.transpose(operands[0], shape, order.tolist())
        if kind in _PRODUCTS:
            return self._product(operation, operands, shape)
        if kind == "Einsum" and len(operands) == 2 and b"." not in operation.get_attr("equation"):
            given, _, made = operation.get_attr("equation").decode().partition("->")
            return reading.contract(operands, given.split(","), made, shape)
        return reading.apply(operands, shape)

    def _product(self, operation: Any, operands: list[ValueForm], shape: tuple[int | None, ...]) -> ValueForm:
        names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
        pairs = [("row", "summed"), ("summed", "column")]
        named = []
        for each, pair, name in zip(operands, pairs, names, strict=True):
            last = pair[::-1] if operation.get_attr(name) else pair
            named.append([*range(-len(each.shape), -2), *last][-len(each.shape) :])
        return self._reading.contract(operands, named, [*range(-len(shape), -2), "row", "column"], shape)

    def _length(self, made: Any, operands: list[ValueForm], shape: tuple[int | None, ...]) -> ValueForm | None:
        """A length of an array, or a product of some; ``None`` if what is ``made`` is neither."""
        operation = made.op
        if operation.type == "Size":
            lengths: Sequence[ValueForm] | None = self._lengths_of(operands[0])
        else:
            lengths = None if shape else self._lengths(operation.inputs[0])
        if lengths is not None and operation.type == "Unpack":
            lengths = [lengths[made.value_index]]
        elif lengths is not None and operation.type in ("GatherV2", "StridedSlice"):
            place = tf.get_static_value(operation.inputs[1])
            lengths = None if place is None else [lengths[int(np.ravel(place)[0])]]
        if lengths is None:
            return None
        return functools.reduce(lambda a, b: self._reading.arithmetic("mul", [a, b], shape), lengths, _ONE)

    def _lengths(self, tensor: Any) -> Sequence[ValueForm] | None:
        """The elements of a vector of lengths, if it is one."""
        operation, known = tensor.op, tf.get_static_value(tensor)
        if known is not None and known.ndim == 1:
            return [ValueForm((), number=float(each)) for each in known]
        inputs = list(operation.inputs)
        match operation.type:
            case "Shape":
                return self._lengths_of(self._values[inputs[0].name])
            case "Pack":
                return [self._values[each.name] for each in inputs]
            case "Cast" | "Identity":
                return self._lengths(inputs[0])
            case "ConcatV2":
                parts = [self._lengths(each) for each in inputs[:-1]]
                return None if None in parts else [each for part in parts for each in part or ()]
            case "StridedSlice" if tensor.shape.rank == 1:
                lengths, limits = self._lengths(inputs[0]), [tf.get_static_value(each) for each in inputs[1:]]
                if lengths is not None and all(each is not None for each in limits):
                    start, stop, step = (int(each[0]) for each in limits)
                    begins, ends = operation.get_attr("begin_mask") & 1, operation.get_attr("end_mask") & 1
                    return lengths[None if begins else start : None if ends else stop : step]
        return None

    def _lengths_of(self, array: ValueForm) -> Sequence[ValueForm]:
        forms = [(COUNT if axis == array.axis else CONSTANT) for axis in range(len(array.shape))]
        return [
            ValueForm((), frozenset((form,))) if length is None else ValueForm((), number=float(length))
            for form, length in zip(forms, array.shape, strict=True)
        ]


def _are_numbers(values: Sequence[ValueForm]) -> bool:
    return all({form.kind for form in each.forms} == {Dependence.NUMBER} for each in values)


def _shape(tensor: Any) -> tuple[int | None, ...]:
    return (None,) if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def _constant(tensor: Any) -> float | None:
    """The number that all elements of a constant are, if they are few."""
    if tensor.dtype.is_floating or tensor.dtype.is_integer:
        value = tf.get_static_value(tensor)
        if value is not None and value.size and value.size <= 64 and np.all(value == value.flat[0]):
            return float(value.flat[0])
    return None


def _axes(operation: Any, ndim: int, left: int) -> list[int] | None:
    """The axes of a reduction, if the graph knows them."""
    known = tf.get_static_value(operation.inputs[1])
    if known is None:
        return list(range(ndim)) if left == 0 else None
    return [int(axis) % max(ndim, 1) for axis in np.ravel(known)]
