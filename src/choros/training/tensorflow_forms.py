"""How a loss in TensorFlow's graph depends on the rows, whose number the graph seldom knows: see ``forms.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import numpy as np
import tensorflow as tf

from choros.comm.request import is_users
from choros.training.forms import CONSTANT, COUNT, MEAN, SUM, Form, Term, is_of_rows, reduces_rows

__all__ = ["is_readable", "line_of", "mark_known", "reader"]

_KNOWN = "_choros_known"
#: A divisor that is a multiple of the number of rows is their number, if that is not a usual constant.
_USUAL = 4

_SAME = frozenset(
    [
        "Cast",
        "CheckNumerics",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "Mean",
        "Neg",
        "PreventGradient",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
        "Sum",
        "Transpose",
    ]
)
_ADD = frozenset(("Add", "AddN", "AddV2", "ConcatV2", "Pack", "Sub"))
_MULTIPLY = frozenset(("Mul", "MulNoNan", "Square"))
_DIVIDE = frozenset(("Div", "DivNoNan", "RealDiv"))
_SUMS = frozenset(("BatchMatMulV2", "Einsum", "L2Loss", "MatMul", "Sum"))
#: What has values of its own, but not of the batch.
_LEAVES = frozenset(("Const", "Fill", "Placeholder", "ReadVariableOp", "VarHandleOp", "VariableV2"))


def is_readable(loss: Any) -> bool:
    """Whether ``loss`` is in a graph, or marked."""
    return tf.is_symbolic_tensor(loss) or hasattr(loss, _KNOWN)


def mark_known(tensor: Any) -> Any:
    """Marks a loss that is one of all ranks already."""
    if tf.is_symbolic_tensor(tensor):
        tensor.graph.add_to_collection(_KNOWN, tensor.name)
    else:
        setattr(tensor, _KNOWN, True)
    return tensor


def reader(rows: int) -> Callable[[Any], Form | Term | None]:
    """Returns the function ``read`` of ``form_of`` for tensors; outside of graphs it knows only what is marked.

    Args:
        rows: the number of rows of the batch; 0 if the graph does not know it.
    """
    return _Reader(rows).read


def line_of(loss: Any) -> str | None:
    """``file:line`` of the user's code that has computed ``loss``; ``None`` outside of graphs."""
    if not tf.is_symbolic_tensor(loss):
        return None
    lines = [(frame.filename, frame.lineno) for frame in loss.op.traceback]
    return next((f"{name}:{line}" for name, line in reversed(lines) if is_users(name)), None)


@final
class _Reader:
    """Reads a graph; if that knows the number of rows, these are found by it, in what depends on the batch."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._with_rows: dict[str, bool] = {}

    def read(self, tensor: Any) -> Form | Term | None:
        """See ``reader``."""
        if isinstance(tensor, Form):
            return tensor
        if not tf.is_symbolic_tensor(tensor):
            return MEAN if hasattr(tensor, _KNOWN) else None
        if tensor.name in tensor.graph.get_collection_ref(_KNOWN):
            return MEAN
        if self._has_rows(tensor):
            return None
        if tf.get_static_value(tensor) is not None:
            return CONSTANT
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        with_rows = any(map(self._has_rows, inputs))
        if kind in ("Shape", "Size"):
            return COUNT if with_rows else CONSTANT
        if kind in ("Prod", "StridedSlice") and inputs[0].op.type == "Shape":
            number = _number(tensor)
            return COUNT if number is None or is_of_rows(number, self._rows) else CONSTANT
        if with_rows:
            return SUM if kind in _SUMS else MEAN if kind == "Mean" else None
        if kind in _SAME:
            return Term("add", inputs[:1])
        if kind in _ADD:
            operands = [each for each in inputs if not _is_zero(each)]
            return Term("add", operands[:-1] if kind == "ConcatV2" else operands)
        if kind in _MULTIPLY:
            return Term("multiply", inputs * (2 if kind == "Square" else 1))
        if kind in _DIVIDE:
            return self._quotient(*inputs)
        if kind == "Prod" and inputs[0].op.type == "Pack":  # the lengths of an array
            return Term("multiply", list(inputs[0].op.inputs))
        return CONSTANT if kind in _LEAVES else Term("apply", inputs)

    def _quotient(self, dividend: Any, divisor: Any) -> Term | None:
        """A division; by a constant that may be the number of rows, it is not known what it is."""
        value = _number(divisor)
        if value is None or not is_of_rows(value, self._rows):
            return Term("divide", [dividend, divisor])
        return Term("divide", [dividend, COUNT]) if self._rows > _USUAL else None

    def _has_rows(self, tensor: Any) -> bool:
        if tensor.shape.rank is None or None in tensor.shape.as_list():
            return True
        return any(is_of_rows(each, self._rows) for each in tensor.shape.as_list() if self._rows) and self._keeps(
            tensor.op
        )

    def _keeps(self, operation: Any) -> bool:
        """Whether an operation computes something of the batch, whose rows it has not reduced."""
        if operation.name not in self._with_rows:
            self._with_rows[operation.name] = False  # of a loop's operations, until it is known
            kind, inputs = operation.type, list(operation.inputs)
            if kind in ("Sum", "Mean"):
                axes = tf.get_static_value(inputs[1])
                lengths = inputs[0].shape.as_list()
                reduced = axes is not None and reduces_rows(lengths, np.ravel(axes).tolist(), self._rows)
                found = not reduced and self._keeps(inputs[0].op)
            elif kind == "Placeholder":
                found = operation.outputs[0].dtype != tf.resource
            else:
                found = kind == "IteratorGetNext" or any(self._keeps(each.op) for each in inputs)
            self._with_rows[operation.name] = found
        return self._with_rows[operation.name]


def _number(tensor: Any) -> float | None:
    """The value of a number that the graph knows, or of all or one of an array's lengths."""
    value, kind = tf.get_static_value(tensor), tensor.op.type
    if value is not None:
        return float(value) if value.ndim == 0 else None
    if kind in ("Cast", "Identity"):
        return _number(tensor.op.inputs[0])
    if kind not in ("Prod", "StridedSlice"):
        return None
    first = tensor.op.inputs[0]
    known = tf.get_static_value(first)
    shape = first.op.inputs[0].shape if first.op.type == "Shape" else tf.TensorShape(None)
    if known is None and shape.rank is None:
        return None
    lengths = shape.as_list() if known is None else list(known)
    if kind == "StridedSlice":
        place = tf.get_static_value(tensor.op.inputs[1])
        lengths = [lengths[int(place[0])]] if place is not None and len(place) == 1 else [None]
    return None if None in lengths else float(math.prod(lengths))


def _is_zero(tensor: Any) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and value.ndim == 0 and value == 0
