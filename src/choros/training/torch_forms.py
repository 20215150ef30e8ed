"""How a loss in PyTorch's graph of gradients depends on the rows: see ``forms.py``.

The graph has the sizes of what was reduced, and no tensors that have no gradient: the rows are found by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from choros.training.forms import CONSTANT, COUNT, MEAN, SUM, Dependence, Form, Term, reduces_rows

__all__ = ["is_readable", "line_of", "mark_known", "reader"]

_KNOWN = "choros"
#: A divisor that is a multiple of the number of rows is their number, if that is not a usual constant.
_USUAL = 4
_SAME = (
    "View",
    "UnsafeView",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
    "Neg",
    "Expand",
    "Permute",
)
_APPLY = ("Abs", "Clamp", "Exp", "Log", "Log1P", "Maximum", "Minimum", "Pow", "Relu", "Rsqrt", "Sqrt", "Tanh")
_MEAN, _SUM = 1, 2


def is_readable(loss: Any) -> bool:
    """Whether the graph has ``loss``."""
    return loss.grad_fn is not None


def mark_known(tensor: Any) -> Any:
    """Marks a loss that is one of all ranks already."""
    if tensor.grad_fn is not None:
        tensor.grad_fn.metadata[_KNOWN] = True
    return tensor


def line_of(loss: Any) -> str | None:
    """Nothing: the graph does not know what code has made it."""
    del loss
    return None


def reader(rows: int) -> Callable[[Any], Form | Term | None]:
    """Returns the function ``read`` of ``form_of`` for tensors, and for the nodes of the graph.

    Args:
        rows: the number of rows of the batch.
    """

    def read(value: Any) -> Form | Term | None:
        node = getattr(value, "grad_fn", value)
        if node is None or isinstance(value, Form):
            return value if isinstance(value, Form) else None
        name, operands = _name(node), [each for each, _ in node.next_functions]
        if node.metadata.get(_KNOWN):
            return MEAN
        if _is_constant(node):
            return CONSTANT
        if (reduction := getattr(node, "_saved_reduction", 0)) in (_MEAN, _SUM):
            weighted = reduction == _MEAN and getattr(node, "_saved_weight", None) is not None and "Nll" in name
            return Form(0, Dependence.OTHER) if weighted else MEAN if reduction == _MEAN else SUM
        if name in ("Sum", "Mean"):
            of_rows = _reduces(node, rows) and _has_rows(operands[0], rows)
            return Term("add", operands) if not of_rows else SUM if name == "Sum" else MEAN
        if name in ("Add", "Sub", "Stack", "Cat", *_SAME):
            return Term("add", [each for each in operands if each is not None])
        if name == "Mul":
            return Term(
                "multiply",
                [
                    _factor(node._saved_self, rows)
                    if each is None and not index
                    else _factor(node._saved_other, rows)
                    if each is None
                    else each
                    for index, each in enumerate(operands)
                ],
            )
        if name == "Div":
            divisor = operands[1] if operands[1] is not None else _divisor(node._saved_other, rows)
            return None if divisor is None or operands[0] is None else Term("divide", [operands[0], divisor])
        return Term("apply", [each for each in operands if each is not None]) if name in _APPLY else None

    return read


def _name(node: Any) -> str:
    """The name of an operation: ``Sum`` for ``SumBackward0``."""
    name: str = node.name().rpartition("::")[2]
    return name.partition("Backward")[0]


def _reduces(node: Any, rows: int) -> bool:
    """Whether a sum or a mean is one over rows."""
    sizes: Sequence[int] = node._saved_self_sym_sizes
    axes = getattr(node, "_saved_dim", None) or range(len(sizes))
    return reduces_rows(sizes, [axis if axis < len(sizes) else axis - 2**64 for axis in axes], rows)


def _has_rows(node: Any, rows: int) -> bool:
    """Whether the rows, if there are any in what a node computes, are not reduced yet."""
    name = _name(node)
    operands = [each for each, _ in node.next_functions if each is not None]
    if name in ("Sum", "Mean"):
        return not _reduces(node, rows) and _has_rows(operands[0], rows)
    if name in ("Add", "Sub", "Mul", "Div", "Stack", "Cat", *_SAME, *_APPLY):
        return any(_has_rows(each, rows) for each in operands)
    return name != "AccumulateGrad"


def _is_constant(node: Any) -> bool:
    """Whether a node computes something of weights alone."""
    name = _name(node)
    if name == "AccumulateGrad":
        return True
    if name not in ("Add", "Sub", "Mul", "Div", "Sum", "Mean", "Stack", "Cat", *_SAME, *_APPLY):
        return False
    others = (getattr(node, attribute, None) for attribute in ("_saved_self", "_saved_other"))
    if any(each is None for each, _ in node.next_functions) and any(
        other is not None and other.ndim and not other.requires_grad for other in others
    ):
        return False
    return all(_is_constant(each) for each, _ in node.next_functions if each is not None)


def _factor(factor: Any, rows: int) -> Form:
    value = float(factor) if factor is not None and factor.ndim == 0 else 0.0
    return Form(-1, Dependence.NUMBER) if value and _is_count(1 / value, rows) else CONSTANT


def _divisor(divisor: Any, rows: int) -> Form | None:
    return COUNT if divisor is not None and divisor.ndim == 0 and _is_count(float(divisor), rows) else None


def _is_count(value: float, rows: int) -> bool:
    return rows > _USUAL and value >= rows and abs(value / rows - round(value / rows)) < 1e-6
