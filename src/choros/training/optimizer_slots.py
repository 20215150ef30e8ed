"""The state of an optimizer that ranks have in slices, as one process has it: in files, and in its order::

one process   iteration  learning_rate  m of a  m of b  v of a  v of b      the slots of the variables a and b
rank 0        iteration  learning_rate  m of a  m of b  v of a  v of b      of a, and the first items of b
rank 1        iteration  learning_rate  m of b  v of b                      of the other items of b

saving, on any ranks ── slot by slot ──► the others give their items when they next wait for one another
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.training.keras_internals.slice_variables import Outline, building, outline
from choros.training.sliced_state import ALONE, Slices


@dataclass(frozen=True)
class Slot:
    """A variable of an optimizer: the ``ordinal``-th one that belongs to the model's variable ``index``; ``None``: to
    none, so that all ranks have it.
    """

    index: int | None
    ordinal: int
    outline: Outline


def slots(entries: Sequence[Outline], of_each: Sequence[Sequence[Outline]], shared: Sequence[Outline]) -> list[Slot]:
    """Returns what an optimizer's variables belong to: ``entries``, if it is built for several variables, ``of_each``
    for each alone, and ``shared`` for none.

    >>> rate, m, v = Outline("rate", (), "float32"), Outline("a_m", (2,), "float32"), Outline("b_m", (3,), "float32")
    >>> [(slot.index, slot.ordinal) for slot in slots([rate, m, v], [[rate, m], [rate, v]], [rate])]
    [(None, 0), (0, 0), (1, 0)]
    """
    owners: dict[Outline, deque[int]] = {}
    for index, own in enumerate(of_each):
        for each in (Counter(own) - Counter(shared)).elements():
            owners.setdefault(each, deque()).append(index)
    counts: Counter[int | None] = Counter()
    results = []
    for each in entries:
        owner = owners[each].popleft() if owners.get(each) else None
        results.append(Slot(owner, counts[owner], each))
        counts[owner] += 1
    return results


def nbytes(variable: Any) -> int:
    """Returns the bytes of a variable, or of its outline."""
    size: int = math.prod(variable.shape) * np.dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
    return size


@final
class OptimizerSlots:
    """The slots of an optimizer that one process would have, and those that this rank has."""

    def __init__(self, optimizer: Any, slices: Slices, first: Sequence[Any] | None = None) -> None:
        """``first``: the variables that the optimizer had before it was built, if it is."""
        self.first = list(optimizer.variables) if first is None else list(first)
        self._optimizer, self._slices = optimizer, slices
        variables, own_variables, pieces = slices.variables, slices.slice_variables, slices.pieces
        of = partial(outline, optimizer, self.first)
        nothing = of([])
        with building(inside=slices.is_inside):
            self.whole = slots(of(variables), [of([each]) for each in variables], nothing)
            own = slots(of(own_variables), [of([each]) for each in own_variables], nothing)
        self._positions = {
            (None if slot.index is None else pieces[slot.index], slot.ordinal): position
            for position, slot in enumerate(own)
        }

    @property
    def variables(self) -> Sequence[Any]:
        """This rank's variables for its slots."""
        variables: Sequence[Any] = self._optimizer.variables
        return variables

    @property
    def of_slices(self) -> list[Any]:
        """Those that other ranks do not have."""
        return [self.variables[position] for (piece, _), position in self._positions.items() if piece is not None]

    def position(self, slot: Slot, number: int = ALONE) -> int | None:
        """The position in ``variables`` of a process's slot, or its items in this slice; ``None``: not of this rank."""
        piece = None if slot.index is None else (slot.index, number)
        return self._positions.get((piece, slot.ordinal))

    def parts(self, number: int, value: NDArray[Any]) -> dict[int, NDArray[Any]]:
        """Returns what this rank has of the ``value`` of a slot of one process, by the positions in ``variables``."""
        slot, slices = self.whole[number], self._slices
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
