"""The state of an optimizer that ranks have in slices, as one process has it: in files, and in its order::

one process   iteration  learning_rate  m of a  m of b  v of a  v of b      the slots of the variables a and b
rank 0        iteration  learning_rate  m of a  m of b  v of a  v of b      of a, and the first items of b
rank 1        iteration  learning_rate  m of b  v of b                      of the other items of b

Any rank may save it, slot by slot: the others give their items when they next wait for one another (``Members.serve``).
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.comm import Array, Request
from choros.parallel.reduce.slices import LOADED, check_loaded, gather_parts
from choros.training.host_gradients import keras_arrays, tell_host
from choros.training.keras_internals.models import innermost
from choros.training.keras_internals.slice_variables import Outline, building, outline, outline_of
from choros.training.sliced_state import ALONE, Slices
from choros.training.variables import value_of

_HELD = Request("optimizer state of the root")
#: Of ranks in a step that have nothing to do but to wait for one another.
MEETING = Request("step of JAX")
#: How often requests of this text were made.
_requested: Counter[str] = Counter()


@dataclass(frozen=True)
class Slot:
    """A variable of an optimizer: the ``ordinal``-th one that belongs to the model's variable ``index``; ``None``: to
    none, so that all ranks have it.
    """

    index: int | None
    ordinal: int
    outline: Outline


def slots(of: Callable[[Sequence[Any]], Sequence[Outline]], variables: Sequence[Any]) -> list[Slot]:
    """Returns what the variables of an optimizer belong to that is built for ``variables``; ``of(some)`` are those that
    it has if it is built for some.

    >>> rate, m, v = Outline("rate", (), "float32"), Outline("a_m", (2,), "float32"), Outline("b_m", (3,), "float32")
    >>> [(slot.index, slot.ordinal) for slot in slots(lambda some: [rate, *some], [m, v])]
    [(None, 0), (0, 0), (1, 0)]
    """
    owners: dict[Outline, deque[int]] = {}
    shared = Counter(of([]))
    for index, variable in enumerate(variables):
        for each in (Counter(of([variable])) - shared).elements():
            owners.setdefault(each, deque()).append(index)
    counts: Counter[int | None] = Counter()
    results = []
    for each in of(variables):
        owner = owners[each].popleft() if owners.get(each) else None
        results.append(Slot(owner, counts[owner], each))
        counts[owner] += 1
    return results


@final
class WholeState:
    """The slots that one process would have; any rank may read them, and each takes its part of given ones.

    Attributes:
        slices: those that this rank has.
        slots: those that one process would have.
        first: the variables that the optimizer had before it was built.
        loaded: whether this rank's part was read from a whole state.
        held: that, until other ranks may have received theirs.
    """

    def __init__(
        self, optimizer: Any, slices: Slices, synchronize: Callable[[], None], before: "WholeState | None" = None
    ) -> None:
        """``optimizer`` is not built yet, but with the slices of ``before``, from which these are cut anew.
        ``synchronize`` gives variables the values that JAX's trainer has.
        """
        inner = innermost(optimizer)
        self._optimizer, self.slices, self._synchronize = inner, slices, synchronize
        self.first: list[Any] = before.first if before else list(inner.variables)
        self.held: Sequence[Array] = before.held if before else ()
        self.loaded, self._started = False, before is not None
        self._state: Sequence[Array] = ()
        of, pieces = partial(outline, inner, self.first), slices.pieces
        with building(inside=slices.is_inside):
            self.slots = slots(of, slices.variables)
            own = slots(of, slices.slice_variables)
        self._positions = {
            (None if slot.index is None else pieces[slot.index], slot.ordinal): position
            for position, slot in enumerate(own)
        }
        self._request: Request = before._request if before else self._served_request(type(inner).__name__)

    @property
    def variables(self) -> Sequence[Any]:
        """This rank's variables for its slots, or parts of slots."""
        variables: Sequence[Any] = self._optimizer.variables
        return variables

    @property
    def undivided(self) -> list[Any]:
        """Those that each rank has whole."""
        positions = [self.position(slot) for slot in self.slots if slot.index not in self.slices.ranges]
        return [self.variables[position] for position in positions if position is not None]

    @property
    def of_slices(self) -> list[Any]:
        """Those that other ranks do not have."""
        return [self.variables[position] for (piece, _), position in self._positions.items() if piece is not None]

    def position(self, slot: Slot, number: int = ALONE) -> int | None:
        """The position in ``variables`` of a process's slot, or its items in this slice; ``None``: not of this rank."""
        piece = None if slot.index is None else (slot.index, number)
        return self._positions.get((piece, slot.ordinal))

    def parts(self, number: int, value: Array) -> dict[int, Array]:
        """Returns what this rank has of the ``value`` of a slot of one process, by the positions in ``variables``."""
        slot, slices = self.slots[number], self.slices
        if slot.index is None or slot.index not in slices.ranges:
            position = self.position(slot)
            return {} if position is None else {position: value}
        found = {}
        for each in slices.held:
            position = self.position(slot, each)
            if position is not None:
                ranges = slices.ranges[slot.index][each]
                found[position] = value.reshape(-1)[slice(*ranges)] if slices.by_item else value
        return found

    def _served_request(self, name: str) -> Request:
        """The request by which a rank asks the others for a slot."""
        shapes = [str(outline_of(variable)[1:]) for variable in self.slices.variables]
        text = f"{len(self.slots)} variables of {name} for {', '.join(shapes)}"
        number = _requested[text] = _requested[text] + 1
        return Request("optimizer state", text, str(number) if number > 1 else "", served=True)

    def serve(self) -> None:
        """From now on, the ranks that there are now may ask this one for its items."""
        communicator = self.slices.process_set.communicator
        communicator.serve(self._request, self.exchange)
        communicator.kept.append(self)

    def whole(self, number: int) -> Array:
        """Returns the slot with this number of one process, gathered from the ranks: a call of this one suffices."""
        slot = self.slots[number]
        if slot.index not in self.slices.ranges:
            return cast(Array, self._value(slot))  # all ranks have it
        communicator = self.slices.process_set.communicator

        def collective() -> NDArray[np.uint8]:
            communicator.agree(self._request, value=number)
            return self.exchange(number)

        return communicator.atomic(collective).view(slot.outline.dtype).reshape(slot.outline.shape)

    def exchange(self, number: int) -> NDArray[np.uint8]:
        """This rank's part in gathering a slot: of each slice, one rank sends the items."""
        slot, slices = self.slots[number], self.slices

        def part(number: int) -> NDArray[np.uint8]:
            value = self._value(slot, number)
            return np.empty(0, np.uint8) if value is None else value.reshape(-1).view(np.uint8)

        return np.concatenate(gather_parts(slices.process_set.communicator, slices.holders, part))

    def receive(self, root_rank: int) -> None:
        """Gives each rank its part of the whole state that ``root_rank`` was given, if it was; all ranks call it.

        Raises:
            ConfigError: on all ranks, if the root has read its own part only, and others have not.
        """
        communicator, ranks = self.slices.process_set.communicator, self.slices.process_set.ranks
        if root_rank not in ranks:
            return  # of which other ranks have none
        root = ranks.index(root_rank)
        holds = communicator.agree(_HELD, value=2 if self.held else int(self.loaded))
        if holds[root] == 1 and 0 in holds:
            check_loaded(holds, ranks)
        if holds[root] == 2:
            values = self.held or [np.empty(slot.outline.shape, slot.outline.dtype) for slot in self.slots]
            for number, value in enumerate(values):
                self.assign(number, communicator.broadcast(value, root))
            self.loaded = False  # all have the same
        self.held = ()

    def check_start(self) -> None:
        """Once, checks that all ranks have read their part of a state, or none; all ranks call it in each update."""
        communicator = self.slices.process_set.communicator
        communicator.kept.append(self)
        if not self._started:
            self._started = True
            loaded = communicator.agree(LOADED, value=int(self.loaded))
            check_loaded(loaded, self.slices.process_set.ranks)
            self.held = ()
        self.loaded = False

    def meet(self, optimizer: Any, values: Sequence[Any]) -> None:
        """In a JAX step that is being compiled, before all else: here ranks wait for one that saves alone. Only the
        step has the state meanwhile, the ``values`` of the outer ``optimizer``'s variables: so the host is given it.
        """
        known = dict(zip(map(id, optimizer.variables), values, strict=True))
        own = [known[id(each)] if id(each) in known else value_of(each) for each in self.variables]

        def wait(hosts: Sequence[Array]) -> None:
            self._state = hosts
            try:
                self.slices.process_set.communicator.agree(MEETING)
            finally:
                self._state = ()

        if keras_arrays().is_symbolic(own):
            tell_host(wait, own)

    def _value(self, slot: Slot, number: int = ALONE) -> Array | None:
        """This rank's value of a slot, or of its items in the slice with this number."""
        position = self.position(slot, number)
        if position is None:
            return None
        if self._state:
            value = self._state[position]
        else:
            self._synchronize()
            value = host_value(self.variables[position])
        return np.asarray(value, order="C")

    def assign(self, number: int, value: Array) -> None:
        """Gives this rank's part of a slot the items of a whole one."""
        self.loaded |= self.slots[number].index is not None
        for position, items in self.parts(number, value).items():
            self.assign_part(position, items)

    def assign_part(self, position: int, items: Array) -> None:
        """Gives the optimizer's variable at a position its items."""
        variable = self.variables[position]
        variable.assign(np.reshape(items, tuple(variable.shape)))


def host_value(variable: Any) -> Array:
    """Returns the value of a variable in host memory."""
    return np.asarray(keras.ops.convert_to_numpy(variable.value), order="C")
