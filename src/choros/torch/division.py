"""How the parameters of an optimizer are divided among ranks, and their state with them; and state as messages of
ranks: tensors, and dicts and lists of these, of which no code is run.
"""

import copy
import inspect
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch

from choros.arrays.torch_arrays import TorchArrays
from choros.errors import ConfigError
from choros.parallel.reduce.gradients import Ranges
from choros.parallel.reduce.slices import even_slices, whole_slices

#: torch's optimizers that update each item by its own gradient and state.
_BY_ITEM = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
#: Those of them that also take sparse gradients: parameters that may have some are cut between rows.
_OF_ROWS = (torch.optim.SGD, torch.optim.Adagrad)
#: Such parts are of whole rows, and of a multiple of this number of items; more would divide small tables unevenly.
_ALIGNED_ROWS = 16
#: The state of a parameter, or of an optimizer.
State: TypeAlias = dict[Any, Any]


@final
@dataclass
class DividedParameter:
    """How a parameter is divided; ``own``: this rank's slice parameter, the parameter itself if it has all items,
    ``None`` if none. ``by_row``: its slice parameters have the parameter's other dimensions.
    """

    ranges: Ranges
    by_row: bool
    own: Any = None

    def shape(self, parameter: Any, rank: int) -> tuple[int, ...]:
        """The shape of the slice parameter of ``rank``."""
        start, stop = self.ranges[rank]
        if stop - start == parameter.numel():
            return tuple(parameter.shape)
        if not self.by_row:
            return (stop - start,)
        return ((stop - start) // math.prod(parameter.shape[1:]), *parameter.shape[1:])

    def items(self, whole: Any, rank: int) -> Any:
        """The items of ``rank`` of a tensor of the parameter's shape, in its memory."""
        return whole.reshape(-1)[slice(*self.ranges[rank])].view(self.shape(whole, rank))

    def cut(self, state: State, parameter: Any, rank: int) -> State:
        """Returns the part of ``rank`` of the whole state of a parameter; values of its shape are of items."""
        start, stop = self.ranges[rank]
        if stop - start == parameter.numel():
            return state

        def part(value: Any) -> Any:
            is_of_items = torch.is_tensor(value) and value.shape == parameter.shape
            return self.items(dense(value), rank).clone() if is_of_items else value

        return {key: part(value) for key, value in state.items()} if start < stop else {}

    def joined(self, parameter: Any, messages: Sequence[bytes]) -> State:
        """Returns the whole state of a parameter, of whose slices these are the messages."""
        parts: dict[int, State] = {number: decoded(message) for number, message in enumerate(messages) if message}
        if not parts:
            return {}
        shapes = {number: self.shape(parameter, number) for number in parts}
        first = min(parts)

        def joined(key: Any, value: Any) -> Any:
            if not torch.is_tensor(value) or tuple(value.shape) != shapes[first]:
                return value
            items = [dense(parts[number][key]).reshape(-1) for number in sorted(parts)]
            return TorchArrays.laid_out_as(parameter, torch.cat(items).view(parameter.shape).to(parameter.device))

        if shapes[first] == tuple(parameter.shape):
            return parts[first]
        return {key: joined(key, value) for key, value in parts[first].items()}


@final
class ParameterDivider:
    """Divides parameters as one optimizer needs it."""

    def __init__(self, optimizer: Any) -> None:
        self.by_item = works_by_item(optimizer)
        self.takes_rows = isinstance(optimizer, _OF_ROWS)

    def evenly(self, parameters: Sequence[Any], ranks: int) -> dict[Any, Ranges]:
        """Divides those that are trained evenly, and those that are frozen now."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        kinds = [dict(zip(kind, self._ranges(kind, ranks), strict=True)) for kind in (trained, frozen)]
        return kinds[0] | kinds[1]

    def divided(self, ranges: Mapping[Any, Ranges]) -> dict[Any, DividedParameter]:
        """By parameter, how it is divided."""
        return {each: DividedParameter(own, self._least_items(each) > 1) for each, own in ranges.items()}

    def _ranges(self, parameters: Sequence[Any], ranks: int) -> Sequence[Ranges]:
        sizes = [parameter.numel() for parameter in parameters]
        if not self.by_item:
            return whole_slices(sizes, ranks)
        return even_slices(sizes, list(map(self._least_items, parameters)), ranks)

    def _least_items(self, parameter: Any) -> int:
        """The number of items of a parameter that are not separated: of whole rows, if its gradient may be sparse."""
        is_table = self.takes_rows and parameter.ndim == 2 and parameter.shape[1] > 0
        return math.lcm(parameter.shape[1], _ALIGNED_ROWS) if is_table else 1


def works_by_item(optimizer: Any) -> bool:
    """Whether an optimizer updates each item of a parameter alone; otherwise it needs whole parameters.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> works_by_item(torch.optim.Adam([weight])), works_by_item(torch.optim.Adafactor([weight]))
    (True, False)
    """
    kinds: list[Any] = [getattr(torch.optim, name) for name in _BY_ITEM]
    own: Any = type(optimizer)
    base: Any = next((kind for kind in own.__mro__ if kind in kinds), None)
    # torch replaces ``step`` by one that calls hooks, in the class of the first optimizer.
    return base is not None and inspect.unwrap(own.step) is inspect.unwrap(base.step)


def parameters_of(optimizer: Any) -> list[Any]:
    """All parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained(optimizer: Any) -> list[Any]:
    """The parameters that are not frozen now."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def state_of_all(optimizer: Any) -> State:
    """The state of an optimizer that belongs to no parameter."""
    return {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}


def dense(value: Any) -> Any:
    """Returns a tensor that is not sparse."""
    return value.to_dense() if value.is_sparse else value


def encoded_or_refused(state: Mapping[Any, Any]) -> bytes:
    """Returns state as a message; if it cannot be saved, one that cannot be loaded: the others wait for it."""
    if not state:
        return b""
    try:
        return encoded(state)
    except Exception as error:  # noqa: BLE001 - a user's values may be any
        return str(error).encode()


def encoded(value: Any) -> bytes:
    """Returns tensors, and dicts and lists of these, as a message."""
    message = io.BytesIO()
    torch.save(on_host(value), message)
    return message.getvalue()


def decoded(message: bytes) -> Any:
    """Returns what ``encoded`` has got; it runs no code of the message."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")  # PyTorch 2.15, of its time
            return torch.load(io.BytesIO(message), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"the state of this optimizer has values that ranks cannot send one another ({error}): keep tensors, "
            "numbers, texts, and lists and dicts of these in it, or leave shard_state out."
        ) from error


def on_host(value: Any) -> Any:
    """Returns ``value`` with its tensors in host memory: other ranks and later jobs use other devices."""
    if torch.is_tensor(value):
        return value.detach().cpu()
    if isinstance(value, np.generic):  # as schedules of the learning rate make them
        return value.item()
    if isinstance(value, dict):  # a copy: a module's state has versions as an attribute
        moved = copy.copy(value)
        moved.update((key, on_host(each)) for key, each in value.items())
        return moved
    if isinstance(value, (list, tuple)):
        return getattr(value, "_make", type(value))(map(on_host, value))
    return value
