"""How PyTorch losses depend on the rows (``forms.py``), noted in the first steps only, as it costs time; gradients."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from choros.training.forms import COMPARISONS, MEAN, SUM, Dependence, Form, Reading, ValueForm

_SAME = frozenset(
    ("_to_copy", "alias", "clone", "contiguous", "copy", "detach", "lift", "lift_fresh", "lift_fresh_copy", "neg", "to")
)
_RESHAPES = frozenset(("_reshape_alias", "_unsafe_view", "flatten", "reshape", "squeeze", "unsqueeze", "view"))
#: The rules of ``Reading.follow`` for two operands.
_OF_TWO = frozenset(("add", "sub", "rsub", "mul", "div", *COMPARISONS))
_MADE = ("arange", "empty", "eye", "full", "linspace", "new_", "ones", "scalar_tensor", "zeros")
_RANDOM = ("bernoulli", "exponential", "multinomial", "normal", "rand", "uniform")
#: The names of the axes of two arrays, and of their product.
_PRODUCTS = {"bmm": ("abc", "acd", "abd"), "dot": ("a", "a", ""), "mm": ("ab", "bc", "ac"), "mv": ("ab", "b", "a")}
_SUMS_WITH_PRODUCTS = {"addmm": "mm", "addmv": "mv", "baddbmm": "bmm"}
#: What takes a part of an axis, which may have several rows of each.
_PARTS = frozenset(("gather", "index_select", "narrow", "slice", "split", "split_with_sizes", "take_along_dim"))
_MEAN, _SUM = 1, 2


@final
class _Notes(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, rows: frozenset[int]) -> None:
        super().__init__()
        self._reading = Reading(rows)
        self.values: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operation of PyTorch."""
        del types
        made = func(*args, **(kwargs or {}))
        results = [each for each in (made if isinstance(made, tuple | list) else (made,)) if torch.is_tensor(each)]
        schema = getattr(func, "_schema", None)
        if results:
            names = [] if schema is None else [each.name for each in schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            if "reduction" in names:
                given.setdefault("reduction", _MEAN)  # PyTorch leaves out an argument that has its default
            name = "" if schema is None else schema.name.rpartition("::")[2].rstrip("_")
            values = [self._read(name, given or {"": list(args)}, tuple(each.shape)) for each in results]
            for each, value in zip(results, values, strict=True):
                self.values[each] = value
        return made

    def value_of(self, given: Any) -> ValueForm:
        """What is known of a tensor, or of a number."""
        if not torch.is_tensor(given):
            return ValueForm((), number=float(given) if isinstance(given, int | float) else None)
        found: ValueForm | None = self.values.get(given)
        if found is not None:
            return found
        shape = tuple(given.shape)
        if isinstance(given, torch.nn.Parameter):
            return ValueForm(shape)
        if not shape and given.device.type == "cpu" and not given.is_complex():
            return ValueForm(shape, number=float(given))
        return self._reading.leaf(shape)

    def _read(self, name: str, given: Mapping[str, Any], shape: tuple[int, ...]) -> ValueForm:
        try:
            return self._result(name, given, shape)
        except Exception:  # noqa: BLE001 - an operation with other arguments than expected: training goes on
            return ValueForm(shape, frozenset())

    def _result(self, name: str, given: Mapping[str, Any], shape: tuple[int, ...]) -> ValueForm:
        reading = self._reading
        first = self.value_of(next(iter(given.values()), None))
        if name in _SAME:
            source = self.value_of(given["src"]) if name == "copy" and "src" in given else first
            return reading.broadcast(source, shape, range(len(shape) - len(source.shape), len(shape)))
        if name.startswith(_RANDOM) or "dropout" in name:
            return reading.apply([*self._operands(given), reading.made(shape, random=True)], shape)
        if name.startswith(_MADE) or name in ("fill", "zero"):
            return reading.made(shape, _number(name, given))
        if name in _OF_TWO:
            operands = [first, self.value_of(given["other"])]
            if given.get("rounding_mode"):
                return reading.apply(operands, shape)
            return reading.follow(name.removeprefix("r"), operands[::-1] if name == "rsub" else operands, shape)
        if name == "prod" and not shape and not given["self"].is_floating_point():  # of lengths, as in Keras' size
            return ValueForm(shape, number=float(given["self"].prod()))
        if name == "reciprocal":
            return reading.arithmetic("div", [ValueForm((), number=1.0), first], shape)
        if name == "pow" and not torch.is_tensor(given["exponent"]) and given["exponent"] == 2:
            return reading.follow("square", [first], shape)
        if name == "where" and "other" in given:
            return reading.select([self.value_of(given[each]) for each in ("condition", "other", "self")], shape)
        if name in ("cat", "stack"):
            parts = [self.value_of(each) for each in given["tensors"] if each.numel()]
            if name == "stack" and parts:
                return reading.stack(parts, shape, given.get("dim", 0) % len(shape))
            return reading.concatenate(parts, shape) if parts else ValueForm(shape)
        if name in ("sum", "mean"):
            axes = given.get("dim")
            every = range(len(first.shape))
            over = every if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
            return reading.reduce(first, over, shape, mean=name == "mean")
        if name in _PRODUCTS or name in _SUMS_WITH_PRODUCTS:
            return self._product(name, given, shape)
        if "reduction" in given and given["reduction"] in (_MEAN, _SUM) and not shape:
            return self._loss(name, given)
        return self._moved(name, given, first, shape)

    def _moved(self, name: str, given: Mapping[str, Any], first: ValueForm, shape: tuple[int, ...]) -> ValueForm:
        reading, axis, ndim = self._reading, first.axis, len(first.shape)
        if name in _RESHAPES:
            return reading.reshape(first, shape)
        if name == "permute":
            return reading.transpose(first, shape, [each % ndim for each in given["dims"]])
        if name in ("t", "transpose"):
            pair = (0, ndim - 1) if name == "t" else (given["dim0"] % ndim, given["dim1"] % ndim) if ndim else (0, 0)
            return replace(first, shape=shape, axis=pair[1 - pair.index(axis)] if axis in pair else axis)
        if name == "expand":
            return reading.broadcast(first, shape, range(len(shape) - ndim, len(shape)))
        axes = () if name in _PARTS else given.get("dim", () if shape else None)
        over = range(ndim) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
        return reading.apply(self._operands(given), shape, [each % ndim for each in over] if ndim else ())

    def _product(self, name: str, given: Mapping[str, Any], shape: tuple[int, ...]) -> ValueForm:
        """A product of matrices or vectors, of stacks of them, or such a product plus something."""
        *added, first, second = self._operands(given)
        *names, made = _PRODUCTS[_SUMS_WITH_PRODUCTS.get(name, name)]
        product = self._reading.contract([first, second], names, made, shape)
        return self._reading.arithmetic("add", [*added, product], shape) if added else product

    def _loss(self, name: str, given: Mapping[str, Any]) -> ValueForm:
        """A loss of ``torch.nn.functional``, as one number."""
        rows = self._reading.apply(self._operands(given), self.value_of(next(iter(given.values()))).shape)
        if rows.axis is None or not rows.forms:
            return self._reading.apply([rows], ())
        if given["reduction"] == _SUM:
            return ValueForm((), frozenset((SUM,)))
        is_weighted = "nll" in name and given.get("weight") is not None
        return ValueForm((), frozenset((Form(0, Dependence.OTHER) if is_weighted else MEAN,)))

    def _operands(self, given: Mapping[str, Any]) -> list[ValueForm]:
        flat = [each for value in given.values() for each in (value if isinstance(value, tuple | list) else (value,))]
        return [self.value_of(each) for each in flat if torch.is_tensor(each)]


_current: _Notes | None = None


@contextmanager
def noted(rows: frozenset[int]) -> Iterator[None]:
    """A context in which what is computed can be read; ``rows``: the numbers of rows of the batch's arrays."""
    global _current
    with _Notes(rows) as notes:
        _current = notes
        try:
            yield
        finally:
            _current = None


def mark_known(tensor: Any) -> Any:
    """Marks a loss that is one of all ranks already."""
    if _current is not None:
        _current.values[tensor] = ValueForm(tuple(tensor.shape), frozenset((MEAN,)))
    return tensor


def line_of(loss: Any) -> str | None:
    """Nothing: the notes do not say what code has made it."""
    del loss
    return None


def total(loss: Any, rows: frozenset[int]) -> Form | None:
    """The form of a loss, or of the sum of losses; ``None`` if it is not known."""
    del rows
    return _current.value_of(loss).total if _current is not None and loss in _current.values else None


def differentiation(factor_of: Callable[[Any], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """What to replace so that weights' gradients of a tensor are multiplied by ``factor_of(tensor)``, if any."""
    own_backward, own_grad = torch.autograd.backward, torch.autograd.grad

    def listed(tensors: Any) -> Any:
        return [tensors] if isinstance(tensors, torch.Tensor) else tensors

    def scaled(targets: Any) -> Any:
        factors = list(map(factor_of, listed(targets)))
        if all(factor is None for factor in factors):
            return targets
        pairs = zip(listed(targets), factors, strict=True)
        return [each if factor is None else each * factor.to(each.dtype) for each, factor in pairs]

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        own_backward(scaled(tensors), *args, **kwargs)

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        of_weights = any(isinstance(each, torch.nn.Parameter) for each in listed(inputs))
        return own_grad(scaled(outputs) if of_weights else outputs, inputs, *args, **kwargs)

    return [(torch.autograd, {"backward": backward, "grad": grad})]


def _number(name: str, given: Mapping[str, Any]) -> float | None:
    if name.startswith(("zero", "ones", "new_zeros", "new_ones")):
        return float("ones" in name)
    number = given.get("fill_value", given.get("value", given.get("s")))
    return float(number) if isinstance(number, int | float) else None
