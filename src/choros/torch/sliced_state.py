"""Optimizers of which each rank has a slice of the state, and updates the parameters' items in it, as
``parallel/reduce/slices.py`` shows. In torch's own ``step``, a slice parameter stands for a rank's items, and is in
their memory.

Optimizers that work item by item have even slices. Others have whole parameters, which are their own slice parameters.

An optimizer that is not used yet, or has just loaded its state, has that of one process, which is cut at the next step.
From then on a rank asks the others for it (``Members.serve``), one parameter at a time.

Loss of a rank: see ``slice_commits.py``.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from choros.arrays.torch_arrays import ADAPTER
from choros.comm import ProcessSet, Request
from choros.errors import ConfigError, EngineError
from choros.parallel.reduce.gradients import GradientKind, Ranges, SparseRows
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.slices import Holders, check_slices, gather_parts, gather_slices, own_items
from choros.torch.division import (
    DividedParameter,
    ParameterDivider,
    State,
    encoded_or_refused,
    parameters_of,
    state_of_all,
)

_ATTRIBUTE = "_choros_slices"


@final
@dataclass(frozen=True)
class SavedSlices:
    """A commit of this rank's slice in memory: what ``slices`` are to ``use``, and a copy of another rank's, as its
    message.
    """

    slices: ParameterSlices
    holders: Holders
    number: int
    divided: dict[Any, DividedParameter]
    used: tuple[Sequence[Any], Mapping[int, State], State]
    copy: NDArray[np.uint8]


@final
class ParameterSlices:
    """This rank's slices of the parameters of an optimizer, among the ranks of a process set.

    Attributes:
        holders: which ranks have which slices, and in elastic jobs a copy in their commits.
        number: that of this rank's slice.
        divided: how each parameter is divided.
        compared: whether ranks have compared the parameters since they were divided.
        loads: how many states of one process steps have begun with since ranks compared that.
        is_checked: whether the state was found to consist of what ranks can send one another.
        name: tells it from others that have the same parameters; the same on every rank.
        reducer: that of the gradients, which has the same name.
        is_whole: whether the state is that of one process now.
    """

    def __init__(self, optimizer: Any, process_set: ProcessSet) -> None:
        self.process_set = process_set
        self.divider = ParameterDivider(optimizer)
        self.divided: dict[Any, DividedParameter] = {}
        self._kind = type(optimizer).__name__
        self.holders = Holders.now(process_set.communicator)
        self.number = process_set.communicator.rank
        self.divide(optimizer)
        # A new rank has created none before it was admitted that the others still use.
        admissions = process_set.admissions
        key = process_set.process_set_id, admissions, self.text
        number = _created[key] = _created[key] + 1
        self.name = f"{number} of {admissions}" if admissions else str(number) if number > 1 else ""
        self.is_whole = True
        self.compared = self.is_checked = False
        self.loads = 0
        self.reducer: GradientReducer | None = None
        self._state: State = optimizer.state
        #: The parameters of each group while slice parameters take their place.
        self._whole_groups: list[tuple[dict[str, Any], list[Any]]] = []
        #: Those that backward passes have computed, while the gradient of a parameter is the reduced one.
        self._own_gradients: list[tuple[Any, Any]] = []
        self._updated: list[Any] = []
        self._serve()
        self.process_set.communicator.kept.append(self)

    def _serve(self) -> None:
        """Lets the ranks that there are now ask this one for its slice."""
        self._request = Request("optimizer state", self.text, self.name, served=True)
        self.process_set.communicator.serve(self._request, self.exchange)

    def call(self, name: str) -> None:
        """Gives the slices, and their reducer, the name that another rank has given them; between two steps."""
        if name != self.name:
            self.name = name
            self._serve()
            if self.reducer is not None:
                self.reducer.rename(name)

    @property
    def text(self) -> str:
        """How the state is divided, as requests and errors say it."""
        shapes = ", ".join(str(self._layout(each)) for each in self.divided)
        return f"{self._kind} in {'even slices' if self.divider.by_item else 'whole parameters'}: {shapes}"

    # division ---------------------------------------------------------------------------------------

    def divide(self, optimizer: Any) -> None:
        """Divides the parameters that are new: those that are trained evenly, and those that are frozen now."""
        new = [parameter for parameter in parameters_of(optimizer) if parameter not in self.divided]
        self.divided |= self.divider.divided(self.divider.evenly(new, len(self.holders.members)))

    def ranges_of(self, parameter: Any) -> Ranges:
        """The items of a parameter on each rank."""
        return self.divided[parameter].ranges

    def _layout(self, parameter: Any) -> GradientKind:
        spec = ADAPTER.spec(parameter)
        return GradientKind(tuple(parameter.shape), spec.dtype, self.divided[parameter].ranges)

    # updates ----------------------------------------------------------------------------------------

    def own_items(self, parameter: Any, gradient: Any) -> Any:
        """Returns this rank's items of a whole gradient, as ``BackwardExchange.scatter`` does; ``None`` of ``None``."""
        if gradient is None:
            return None
        items = self.divided[parameter].ranges[self.number]
        if not gradient.is_sparse:
            return gradient.reshape(-1)[slice(*items)]
        sparse = gradient if gradient.sparse_dim() == 1 else gradient.to_dense().to_sparse(1)
        rows = own_items(SparseRows(*ADAPTER.rows_of(sparse)), *items)  # type: ignore[misc]
        return ADAPTER.from_rows(rows.indices, rows.values, rows.shape)

    def begin(self, optimizer: Any, items: Mapping[Any, Any]) -> None:
        """Puts the slice parameters into the groups, with this rank's ``items`` of the gradients of parameters."""
        self.settle(optimizer)
        self._updated = list(items)
        for parameter, gradient in items.items():
            division = self.divided[parameter]
            if division.own is None:
                continue
            if division.own is parameter:
                self._own_gradients.append((parameter, parameter.grad))
            else:
                division.own.data = division.items(parameter.data, self.number)
            division.own.grad = self._placed(optimizer, parameter, gradient, division)
        for group in optimizer.param_groups:
            whole = group["params"]
            self._whole_groups.append((group, whole))
            own = [self.divided[parameter].own for parameter in whole if parameter in items]
            group["params"] = [each for each in own if each is not None]

    def _placed(self, optimizer: Any, parameter: Any, gradient: Any, division: DividedParameter) -> Any:
        """Returns the gradient of a slice parameter, sparse where that of the parameter would be."""
        if gradient is None:
            return None
        if gradient.is_sparse:
            if self.divider.by_item and not self.divider.takes_rows:
                raise ConfigError(
                    f"{type(optimizer).__name__} does not support sparse gradients: use torch.optim.SparseAdam, or "
                    "embeddings without sparse=True."
                )
            return gradient
        dense = gradient.reshape(division.own.shape)
        before = parameter.grad
        if before is not None and before.is_sparse:
            return dense.to_sparse(before.sparse_dim())
        if isinstance(optimizer, torch.optim.SparseAdam):
            return dense.to_sparse(1)
        return ADAPTER.laid_out_as(division.own, dense)

    def end(self, optimizer: Any) -> None:
        """Puts the parameters back into the groups, and gathers the items that the ranks have updated."""
        self.restore()
        self._state = optimizer.state
        for parameter in self._updated:
            own = self.divided[parameter].own
            if own is not None and own is not parameter:
                own.grad = None
        self._gather()
        self.process_set.communicator.kept.append(self)

    def restore(self) -> None:
        """Puts the parameters back into the groups, also if ``step`` has failed."""
        while self._whole_groups:
            group, group["params"] = self._whole_groups.pop()
        while self._own_gradients:
            parameter, gradient = self._own_gradients.pop()
            parameter.grad = gradient

    def _gather(self) -> None:
        """Gives the parameters of the update the items of all ranks' slice parameters."""
        updated, communicator = self._updated, self.process_set.communicator
        layout = list(map(self._layout, updated))
        owns = enumerate(self.divided[parameter].own for parameter in updated)
        held = {(communicator.rank, index): ADAPTER.to_host(own) for index, own in owns if own is not None}
        # Slice parameters are parts of these.
        in_place = [ADAPTER.own_host_memory([parameter]) for parameter in updated]
        outs = [
            ADAPTER.to_host(parameter).reshape(-1) if here else np.empty(parameter.numel(), each.dtype)
            for parameter, each, here in zip(updated, layout, in_place, strict=True)
        ]
        gathered = gather_slices(communicator, layout, held, outs, self.name)
        for parameter, host, here in zip(updated, gathered, in_place, strict=True):
            if not here:
                parameter.data.copy_(ADAPTER.from_host(host, parameter))
        torch.autograd.graph.increment_version(updated)  # autograd detects that they have changed

    # state ------------------------------------------------------------------------------------------

    def settle(self, optimizer: Any) -> None:
        """Keeps only this rank's slices of a state of one process; from now on each rank has its own."""
        self.divide(optimizer)
        for parameter, division in self.divided.items():
            start, stop = division.ranges[self.number]
            if start < stop and division.own is None:
                part = torch.nn.Parameter(division.items(parameter.data, self.number), requires_grad=False)
                division.own = parameter if stop - start == parameter.numel() else part
        self._state = optimizer.state
        if not self.is_whole:
            return
        state = {key: value for key, value in optimizer.state.items() if key not in self.divided}
        for parameter, division in self.divided.items():
            if division.own is not None and parameter in optimizer.state:
                state[division.own] = self.cut(optimizer.state[parameter], parameter)
        optimizer.state.clear()
        optimizer.state.update(state)
        self.is_whole = False

    def cut(self, state: State, parameter: Any) -> State:
        """Returns this rank's part of the whole state of a parameter."""
        return self.divided[parameter].cut(state, parameter, self.number)

    def loaded(self, optimizer: Any) -> None:
        """Notes that ``optimizer`` has loaded the state of one process."""
        self._state, self.is_whole = optimizer.state, True

    def part(self, parameter: Any) -> State:
        """This rank's part of the state of a parameter."""
        if self.is_whole:
            return self.cut(self._state[parameter], parameter) if parameter in self._state else {}
        own = self.divided[parameter].own
        return self._state[own] if own is not None and own in self._state else {}

    @contextmanager
    def as_one_process(self, optimizer: Any) -> Iterator[None]:
        """A context in which ``optimizer`` has the state of one process; a call of this rank suffices."""
        self.restore()
        if self.is_whole:
            yield
            return
        own: State = optimizer.state
        whole: defaultdict[Any, State] = defaultdict(dict, state_of_all(optimizer))
        for index, parameter in enumerate(self.divided):
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

        return self.divided[parameter].joined(parameter, communicator.atomic(collective))

    def exchange(self, index: int) -> list[bytes]:
        """This rank's part in gathering the state of the parameter with this number; returns the slices' messages."""
        communicator, parameter = self.process_set.communicator, list(self.divided)[index]
        check_slices(len(self.holders.members), communicator)
        return self.gather_messages(Holders(communicator.launched), lambda _: self.part(parameter))

    def gather_messages(self, holders: Holders, part: Callable[[int], State]) -> list[bytes]:
        """Gathers ``part`` of each slice from a rank that has it; by slice, its message."""

        def message(number: int) -> NDArray[np.uint8]:
            return np.frombuffer(encoded_or_refused(part(number)), np.uint8)

        return [each.tobytes() for each in gather_parts(self.process_set.communicator, holders, message)]

    def divide_anew(self, ranges: Mapping[Any, Ranges]) -> None:
        """From now on, the ranks that there are have these items of the parameters."""
        communicator = self.process_set.communicator
        self.holders, self.number = Holders.now(communicator), communicator.rank
        self.compared, self.loads = False, 0
        self.divided = self.divider.divided(ranges)
        self._serve()

    def use(self, optimizer: Any, settings: Sequence[Any], state: Mapping[int, State], others: State) -> None:
        """Makes these parts of the parameters' states, and what ``others`` have, the state of this rank."""
        numbers = itertools.count()
        groups = [
            {**own, "params": [next(numbers) for _ in group["params"]]}
            for own, group in zip(settings, optimizer.param_groups, strict=True)
        ]
        parts = {index: part for index, part in state.items() if part}
        optimizer.load_state_dict({"state": {**others, **parts}, "param_groups": groups})
        self.settle(optimizer)  # of parts that are cut already


#: How many there were with this text in this process set.
_created: Counter[tuple[int | None, int, str]] = Counter()


def slices_of(optimizer: Any) -> ParameterSlices | None:
    """The slices of an optimizer, if it has some."""
    return getattr(optimizer, _ATTRIBUTE, None)


def slice_state(optimizer: Any, process_set: ProcessSet) -> ParameterSlices:
    """Divides an optimizer's parameters among the ranks of a process set."""
    slices = ParameterSlices(optimizer, process_set)
    setattr(optimizer, _ATTRIBUTE, slices)
    return slices


def whole_state(optimizer: Any) -> AbstractContextManager[None]:
    """A context in which ``optimizer`` has the state of one process, if each rank has a slice of it."""
    slices = slices_of(optimizer)
    return nullcontext() if slices is None else slices.as_one_process(optimizer)


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
