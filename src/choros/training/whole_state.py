"""The state of an optimizer that ranks have in slices, as one process has it::

rank 0                               rank 1
model.save: slot 3 ──── asks ──────► waits for rank 0 in its next step, or has ended
         m ◄──── its items of m ──── serves (comm/members.py), and waits again
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.comm import Request
from choros.parallel.reduce.slices import LOADED, check_loaded
from choros.training.host_gradients import FLAG, keras_arrays
from choros.training.keras_internals.models import innermost
from choros.training.keras_internals.slice_variables import outline_of
from choros.training.optimizer_slots import OptimizerSlots, Slot
from choros.training.sliced_state import ALONE, Slices
from choros.training.variables import value_of

_HELD = Request("optimizer state of the root")
#: Of ranks in a step that have nothing to do but to wait for one another.
MEETING = Request("step of JAX")
#: How often requests of this text were made.
_requested: Counter[str] = Counter()


@final
class WholeState:
    """The slots that one process would have; any rank may read them, and each takes its part of given ones.

    Attributes:
        loaded: whether this rank's part was read from a whole state.
        held: that, until other ranks may have received theirs.
    """

    def __init__(self, optimizer: Any, slices: Slices, synchronize: Callable[[], None]) -> None:
        """``optimizer`` is not built yet. ``synchronize`` gives variables the values that JAX's trainer has."""
        inner = innermost(optimizer)
        self._slices = slices
        self._synchronize = synchronize
        self._state: Sequence[NDArray[Any]] = ()
        self.loaded = False
        self.held: Sequence[NDArray[Any]] = ()
        self._started = False
        self.slots = OptimizerSlots(inner, slices)
        self._request = self._served_request(type(inner).__name__)
        self._serve()

    def _served_request(self, name: str) -> Request:
        """The request by which a rank asks the others for a slot."""
        shapes = [str(outline_of(variable)[1:]) for variable in self._slices.variables]
        text = f"{len(self.slots.whole)} variables of {name} for {', '.join(shapes)}"
        number = _requested[text] = _requested[text] + 1
        return Request("optimizer state", text, str(number) if number > 1 else "", served=True)

    def _serve(self) -> None:
        """Lets the ranks that there are now ask this one for its items."""
        communicator = self._slices.process_set.communicator
        communicator.serve(self._request, self.exchange)
        communicator.kept.append(self)

    def whole(self, number: int) -> NDArray[Any]:
        """Returns the slot with this number of one process, gathered from the ranks: a call of this one suffices."""
        slot = self.slots.whole[number]
        if slot.index not in self._slices.ranges:
            return cast(NDArray[Any], self._value(slot))  # all ranks have it
        communicator = self._slices.process_set.communicator

        def collective() -> NDArray[np.uint8]:
            communicator.agree(self._request, value=number)
            return self.exchange(number)

        return communicator.atomic(collective).view(slot.outline.dtype).reshape(slot.outline.shape)

    def exchange(self, number: int) -> NDArray[np.uint8]:
        """This rank's part in gathering a slot: of each slice, one rank sends the items."""
        slot, slices = self.slots.whole[number], self._slices
        index, communicator = cast(int, slot.index), slices.process_set.communicator
        senders = slices.holders.senders(communicator.launched)
        items = math.prod(slot.outline.shape)
        width = np.dtype(slot.outline.dtype).itemsize
        sizes = [
            (stop - start if slices.by_item else items * (stop > start)) * width for start, stop in slices.ranges[index]
        ]
        order = sorted(range(len(senders)), key=senders.__getitem__)
        values = [self._value(slot, each) for each in order if senders[each] == communicator.rank]
        own = [value.reshape(-1).view(np.uint8) for value in values if value is not None]
        counts = [0] * communicator.size
        for size, sender in zip(sizes, senders, strict=True):
            counts[sender] += size
        received = communicator.gather_bytes(np.concatenate([*own, np.empty(0, np.uint8)]), counts)
        if order == [*range(len(order))]:
            return received
        ends = np.cumsum([sizes[each] for each in order])
        parts = {each: received[end - sizes[each] : end] for each, end in zip(order, ends, strict=True)}
        return np.concatenate([parts[each] for each in range(len(order))])

    def receive(self, root_rank: int) -> None:
        """Gives each rank its part of the whole state that ``root_rank`` was given, if it was; all ranks call it.

        Raises:
            ConfigError: on all ranks, if the root has read its own part only, and others have not.
        """
        communicator, ranks = self._slices.process_set.communicator, self._slices.process_set.ranks
        if root_rank not in ranks:
            return  # of which other ranks have none
        root = ranks.index(root_rank)
        holds = communicator.atomic(lambda: communicator.agree(_HELD, value=2 if self.held else int(self.loaded)))
        if holds[root] == 1 and 0 in holds:
            check_loaded(holds, ranks)
        if holds[root] == 2:
            values = self.held or [np.empty(slot.outline.shape, slot.outline.dtype) for slot in self.slots.whole]
            for number, value in enumerate(values):
                self.assign(number, communicator.broadcast(value, root))
            self.loaded = False  # all have the same
        self.held = ()

    def check_start(self) -> None:
        """Once, checks that all ranks have read their part of a state, or none; all ranks call it in each update."""
        communicator = self._slices.process_set.communicator
        communicator.kept.append(self)
        if not self._started:
            self._started = True
            loaded = communicator.atomic(lambda: communicator.agree(LOADED, value=int(self.loaded)))
            check_loaded(loaded, self._slices.process_set.ranks)
            self.held = ()
        self.loaded = False

    def meet(self, optimizer: Any, values: Sequence[Any]) -> None:
        """In a JAX step that is being compiled, before all else: here ranks wait for one that saves alone. Only the
        step has the state meanwhile, the ``values`` of the outer ``optimizer``'s variables: so the host is given it.
        """
        known = dict(zip(map(id, optimizer.variables), values, strict=True))
        own = [known[id(each)] if id(each) in known else value_of(each) for each in self.slots.variables]
        communicator = self._slices.process_set.communicator

        def on_host(hosts: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
            self._state = hosts
            try:
                communicator.atomic(lambda: communicator.agree(MEETING))
            finally:
                self._state = ()
            return [np.asarray(0, np.int32)]

        if keras_arrays().is_symbolic(own):
            keras_arrays().host_call(on_host, own, [FLAG])

    def _value(self, slot: Slot, number: int = ALONE) -> NDArray[Any] | None:
        """This rank's value of a slot, or of its items in the slice with this number."""
        position = self.slots.position(slot, number)
        if position is None:
            return None
        if self._state:
            value = self._state[position]
        else:
            self._synchronize()
            value = host_value(self.slots.variables[position])
        return np.asarray(value, order="C")

    def assign(self, number: int, value: NDArray[Any]) -> None:
        """Gives this rank's part of a slot the items of a whole one."""
        self.loaded = True
        for position, items in self.slots.parts(number, value).items():
            self.assign_part(position, items)

    def assign_part(self, position: int, items: NDArray[Any]) -> None:
        """Gives the optimizer's variable at a position its items."""
        variable = self.slots.variables[position]
        variable.assign(np.reshape(items, tuple(variable.shape)))

    def cut_anew(self, slices: Slices, slots: OptimizerSlots) -> None:
        """From now on, this rank has the pieces in ``slices``, as the others have theirs."""
        self._slices, self.slots = slices, slots
        self._started, self.loaded = True, False
        self._serve()


def host_value(variable: Any) -> NDArray[Any]:
    """Returns the value of a variable in host memory."""
    return np.asarray(keras.ops.convert_to_numpy(variable.value), order="C")
