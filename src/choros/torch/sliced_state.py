"""Optimizers of which each rank has a slice of the state, and updates the parameters' items in it. Two ranks, a
parameter p and Adam; a slice parameter stands for a rank's items of p in torch's own ``step``, and is in their memory::

                 rank 0                             rank 1
    gradients    ─────────────── reducescatter ────────────────      parallel/reduce/slices.py
                 g[:n]                              g[n:]
    update       p[:n], m[:n], …                    p[n:], m[n:], …  torch's, unchanged, on the slice parameters
    parameters   ───────────────── allgather ──────────────────
                 p                                  p

Optimizers that work item by item have even slices. Others have whole parameters, which are their own slice parameters.

An optimizer that is not used yet, or has just loaded its state, has that of one process, which is cut at the next step.
From then on a rank asks the others for it, one parameter at a time::

    rank 0                         rank 1
    state_dict()                   waits in its next collective, or ends
    asks for the state of p        gives m[n:], …
    {0: {"m": m, …}}
"""

from __future__ import annotations

import inspect
import io
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from choros.arrays.torch_arrays import TorchArrays
from choros.comm import ProcessSet, Request
from choros.errors import ConfigError, EngineError
from choros.parallel.reduce.gradients import Ranges, SliceLayout, SparseRows
from choros.parallel.reduce.slices import even_slices, gather_slices, own_items, whole_slices

#: torch's optimizers that update each item by its own gradient and state.
_BY_ITEM = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
#: Those of them that also take sparse gradients: parameters that may have some are cut between rows.
_OF_ROWS = (torch.optim.SGD, torch.optim.Adagrad)
#: Such parts are of whole rows, and of a multiple of this number of items; more would divide small tables unevenly.
_ALIGNED_ROWS = 16
_ATTRIBUTE = "_choros_slices"
#: The optimizers in use are kept, for ranks that ask for their state later: those with one of the last steps.
_KEPT_STEPS = 64
_arrays = TorchArrays()
State = dict[Any, Any]


@dataclass
class _Parts:
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


@final
class ParameterSlices:
    """This rank's slices of the parameters of an optimizer, among the ranks of a process set.

    Attributes:
        name: tells it from others that have the same parameters; the same on every rank.
        is_whole: whether the state is that of one process now.
    """

    def __init__(self, optimizer: Any, process_set: ProcessSet) -> None:
        self.process_set = process_set
        self._by_item = works_by_item(optimizer)
        self._takes_rows = isinstance(optimizer, _OF_ROWS)
        self._divisions: dict[Any, _Parts] = {}
        self.divide(optimizer)
        kind = type(optimizer).__name__
        shapes = ", ".join(str(self._layout(each)) for each in self._divisions)
        self.text = f"{kind} in {'even slices' if self._by_item else 'whole parameters'}: {shapes}"
        number = _created[process_set.process_set_id, self.text] = _created[process_set.process_set_id, self.text] + 1
        self.name = str(number) if number > 1 else ""
        self.is_whole = True
        self._state: State = optimizer.state
        #: The parameters of each group while slice parameters take their place.
        self._whole_groups: list[tuple[dict[str, Any], list[Any]]] = []
        self._updated: list[Any] = []
        self._request = Request("optimizer state", self.text, self.name, served=True)
        process_set.communicator.serve(self._request, self.exchange)
        _recent.add(self)

    # division ---------------------------------------------------------------------------------------

    def divide(self, optimizer: Any) -> None:
        """Divides the parameters that are new: those that are trained evenly, and those that are frozen now."""
        new = [p for group in optimizer.param_groups for p in group["params"] if p not in self._divisions]
        for parameters in ([p for p in new if p.requires_grad], [p for p in new if not p.requires_grad]):
            for parameter, ranges in zip(parameters, self._divided(parameters), strict=True):
                self._divisions[parameter] = _Parts(ranges, self._least_items(parameter) > 1)

    def _divided(self, parameters: Sequence[Any]) -> Sequence[Ranges]:
        sizes, ranks = [parameter.numel() for parameter in parameters], self.process_set.communicator.size
        if not self._by_item:
            return whole_slices(sizes, ranks)
        return even_slices(sizes, list(map(self._least_items, parameters)), ranks)

    def _least_items(self, parameter: Any) -> int:
        """The number of items of a parameter that are not separated: of whole rows, if its gradient may be sparse."""
        is_table = self._takes_rows and parameter.ndim == 2 and parameter.shape[1] > 0
        return math.lcm(parameter.shape[1], _ALIGNED_ROWS) if is_table else 1

    def ranges_of(self, parameter: Any) -> Ranges:
        """The items of a parameter on each rank."""
        return self._divisions[parameter].ranges

    @property
    def parameters(self) -> list[Any]:
        """All parameters, in the same order on all ranks."""
        return list(self._divisions)

    def _layout(self, parameter: Any) -> SliceLayout:
        spec = _arrays.spec(parameter)
        return SliceLayout(tuple(parameter.shape), spec.dtype, self._divisions[parameter].ranges)

    @property
    def _rank(self) -> int:
        return self.process_set.communicator.rank

    # updates ----------------------------------------------------------------------------------------

    def own_items(self, parameter: Any, gradient: Any) -> Any:
        """Returns this rank's items of a whole gradient, as ``BackwardExchange.scatter`` does; ``None`` of ``None``."""
        if gradient is None:
            return None
        items = self._divisions[parameter].ranges[self._rank]
        if not gradient.is_sparse:
            return gradient.reshape(-1)[slice(*items)]
        sparse = gradient if gradient.sparse_dim() == 1 else gradient.to_dense().to_sparse(1)
        indices, values, shape = _arrays.rows_of(sparse)  # type: ignore[misc]
        rows = own_items(SparseRows(_arrays.to_host(indices), _arrays.to_host(values), shape), *items)
        own_indices, own_values = (_arrays.from_host(each, gradient) for each in (rows.indices, rows.values))
        return _arrays.from_rows(own_indices, own_values, rows.shape)

    def begin(self, optimizer: Any, items: Mapping[Any, Any]) -> None:
        """Puts the slice parameters into the groups, with this rank's ``items`` of the gradients of parameters."""
        self.settle(optimizer)
        self._updated = list(items)
        for parameter, gradient in items.items():
            division = self._divisions[parameter]
            start, stop = division.ranges[self._rank]
            if start == stop:
                continue
            if division.own is not parameter:
                part = parameter.data.reshape(-1)[start:stop].view(division.shape(parameter, self._rank))
                division.own.data = part
            division.own.grad = self._placed(optimizer, parameter, gradient, division)
        for group in optimizer.param_groups:
            whole = group["params"]
            self._whole_groups.append((group, whole))
            own = [self._divisions[parameter].own for parameter in whole if parameter in items]
            group["params"] = [each for each in own if each is not None]

    def _placed(self, optimizer: Any, parameter: Any, gradient: Any, division: _Parts) -> Any:
        """Returns the gradient of a slice parameter, sparse where that of the parameter would be."""
        if gradient is None:
            return None
        if gradient.is_sparse:
            if self._by_item and not self._takes_rows:
                raise ConfigError(
                    f"{type(optimizer).__name__} does not support sparse gradients: use torch.optim.SparseAdam, or "
                    "embeddings without sparse=True."
                )
            return gradient
        dense = gradient.reshape(division.own.shape)
        before = parameter.grad
        if before is not None and before.is_sparse:
            return dense.to_sparse(before.sparse_dim())
        return dense.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else dense

    def end(self, optimizer: Any) -> None:
        """Puts the parameters back into the groups, and gathers the items that the ranks have updated."""
        self.restore()
        self._state = optimizer.state
        for parameter in self._updated:
            own = self._divisions[parameter].own
            if own is not None and own is not parameter:
                own.grad = None
        self._gather()
        _recent.add(self)

    def restore(self) -> None:
        """Puts the parameters back into the groups, also if ``step`` has failed."""
        while self._whole_groups:
            group, group["params"] = self._whole_groups.pop()

    def _gather(self) -> None:
        """Gives the parameters of the update the items of all ranks' slice parameters."""
        updated, layout, outs, own = self._updated, [], [], []
        for parameter in updated:
            each, items = self._layout(parameter), self._divisions[parameter].own
            if _arrays.own_host_memory([parameter]):  # the slice parameter is a part of it
                out = _arrays.to_host(parameter).reshape(-1)
                mine = out[slice(*each.ranges[self._rank])]
            else:
                out = np.empty(parameter.numel(), each.dtype)
                mine = out[:0] if items is None else _arrays.to_host(items).reshape(-1)
            layout.append(each)
            outs.append(out)
            own.append(mine)
        gather_slices(self.process_set.communicator, layout, own, outs, self.name)
        for parameter, out in zip(updated, outs, strict=True):
            if not _arrays.own_host_memory([parameter]):
                parameter.data.copy_(_arrays.from_host(out.reshape(parameter.shape), parameter))
        torch.autograd.graph.increment_version(updated)  # autograd detects that they have changed

    # state ------------------------------------------------------------------------------------------

    def settle(self, optimizer: Any) -> None:
        """Keeps only this rank's slices of a state of one process; from now on each rank has its own."""
        self.divide(optimizer)
        for parameter, division in self._divisions.items():
            start, stop = division.ranges[self._rank]
            if start < stop and division.own is None:
                whole = stop - start == parameter.numel()
                part = parameter.data.reshape(-1)[start:stop].view(division.shape(parameter, self._rank))
                division.own = parameter if whole else torch.nn.Parameter(part, requires_grad=False)
        self._state = optimizer.state
        if not self.is_whole:
            return
        state = {key: value for key, value in optimizer.state.items() if key not in self._divisions}
        for parameter, division in self._divisions.items():
            if division.own is not None and parameter in optimizer.state:
                state[division.own] = self.cut(optimizer.state[parameter], parameter)
        optimizer.state.clear()
        optimizer.state.update(state)
        self.is_whole = False

    def cut(self, state: State, parameter: Any) -> State:
        """Returns this rank's part of the whole state of a parameter; values of its shape are of items."""
        division = self._divisions[parameter]
        start, stop = division.ranges[self._rank]
        if stop - start == parameter.numel():
            return state
        shape = division.shape(parameter, self._rank)

        def part(value: Any) -> Any:
            if not torch.is_tensor(value) or value.shape != parameter.shape:
                return value
            return _dense(value).reshape(-1)[start:stop].clone().view(shape)

        return {key: part(value) for key, value in state.items()} if start < stop else {}

    def loaded(self, optimizer: Any) -> None:
        """Notes that ``optimizer`` has loaded the state of one process."""
        self._state, self.is_whole = optimizer.state, True

    def part(self, parameter: Any) -> State:
        """This rank's part of the state of a parameter."""
        if self.is_whole:
            return self.cut(self._state[parameter], parameter) if parameter in self._state else {}
        own = self._divisions[parameter].own
        return self._state[own] if own is not None and own in self._state else {}

    @contextmanager
    def as_one_process(self, optimizer: Any) -> Iterator[None]:
        """A context in which ``optimizer`` has the state of one process; a call of this rank suffices."""
        self.restore()
        if self.is_whole:
            yield
            return
        own: State = optimizer.state
        whole: defaultdict[Any, State] = defaultdict(dict)
        whole.update({key: value for key, value in own.items() if not torch.is_tensor(key)})
        for index, parameter in enumerate(self._divisions):
            if state := self._whole_state(index, parameter):
                whole[parameter] = state
        optimizer.state = whole
        try:
            yield
        finally:
            optimizer.state = own

    def _whole_state(self, index: int, parameter: Any) -> State:
        """Gathers the state of a parameter."""
        communicator = self.process_set.communicator

        def collective() -> list[bytes]:
            communicator.agree(self._request, value=index)
            return self.exchange(index)

        division = self._divisions[parameter]
        messages = communicator.atomic(collective)
        parts: dict[int, State] = {rank: decoded(message) for rank, message in enumerate(messages) if message}
        if not parts:
            return {}
        shapes = {rank: division.shape(parameter, rank) for rank in parts}
        first = min(parts)

        def joined(key: Any, value: Any) -> Any:
            if not torch.is_tensor(value) or tuple(value.shape) != shapes[first]:
                return value
            items = [_dense(parts[rank][key]).reshape(-1) for rank in sorted(parts)]
            return torch.cat(items).view(parameter.shape).to(parameter.device)

        if shapes[first] == tuple(parameter.shape):
            return parts[first]
        return {key: joined(key, value) for key, value in parts[first].items()}

    def exchange(self, index: int) -> list[bytes]:
        """This rank's part in gathering the state of the parameter with this number; returns the ranks' messages."""
        communicator = self.process_set.communicator
        message = np.frombuffer(_encoded(self.part(self.parameters[index])), np.uint8)
        own = np.array([message.size], np.int64).view(np.uint8)
        lengths = communicator.gather_bytes(own, [own.size] * communicator.size).view(np.int64).tolist()
        together: NDArray[np.uint8] = communicator.gather_bytes(message, lengths)
        ends = np.cumsum(lengths).tolist()
        return [together[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]


@final
class _Recent:
    """Those that are kept although their optimizers may be gone: of the last steps."""

    def __init__(self) -> None:
        self._last: dict[ParameterSlices, int] = {}
        self._steps = 0

    def add(self, slices: ParameterSlices) -> None:
        self._steps += 1
        self._last[slices] = self._steps
        for each in [each for each, step in self._last.items() if step <= self._steps - _KEPT_STEPS]:
            del self._last[each]


_recent = _Recent()
#: How many there were with this text in this process set.
_created: Counter[tuple[int | None, str]] = Counter()


def slices_of(optimizer: Any) -> ParameterSlices | None:
    """The slices of an optimizer, if it has some."""
    return getattr(optimizer, _ATTRIBUTE, None)


def slice_state(optimizer: Any, process_set: ProcessSet) -> ParameterSlices:
    """Divides an optimizer's parameters among the ranks of a process set."""
    slices = ParameterSlices(optimizer, process_set)
    setattr(optimizer, _ATTRIBUTE, slices)
    return slices


@contextmanager
def whole_state(optimizer: Any) -> Iterator[None]:
    """A context in which ``optimizer`` has the state of one process, if each rank has a slice of it."""
    slices = slices_of(optimizer)
    if slices is None:
        yield
    else:
        with slices.as_one_process(optimizer):
            yield


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, such as the learning rate."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def use_settings(optimizer: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    """Gives an optimizer's groups the settings of another rank's."""
    groups = optimizer.param_groups
    if len(settings) != len(groups):
        raise EngineError(
            f"the optimizer of this rank has {len(groups)} groups of parameters, and that of another rank "
            f"{len(settings)}: call add_param_group() on all ranks, before one calls join()."
        )
    for group, each in zip(groups, settings, strict=True):
        group.update(each)


def take_state(optimizer: Any, settings: Sequence[Any], parts: Mapping[Any, State]) -> None:
    """Gives ``optimizer`` these settings, and parts of this rank that are already ``cut``."""
    groups, numbers = optimizer.param_groups, itertools.count()
    indices = {each: number for group in groups for each, number in zip(group["params"], numbers, strict=False)}
    packed = [
        {**own, "params": [indices[each] for each in group["params"]]}
        for own, group in zip(settings, groups, strict=True)
    ]
    state = {indices[parameter]: part for parameter, part in parts.items() if part}
    optimizer.load_state_dict({"state": state, "param_groups": packed})


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


def _encoded(state: State) -> bytes:
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
        return torch.load(io.BytesIO(message), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"the state of this optimizer has values that ranks cannot send one another ({error}): keep tensors, "
            "numbers, texts, and lists and dicts of these in it, or leave shard_state out."
        ) from error


def on_host(value: Any) -> Any:
    """Returns ``value`` with its tensors in host memory: other ranks use other devices."""
    if torch.is_tensor(value):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return type(value)(map(on_host, value)) if isinstance(value, (list, tuple)) else value


def _dense(value: Any) -> Any:
    return value.to_dense() if value.is_sparse else value
