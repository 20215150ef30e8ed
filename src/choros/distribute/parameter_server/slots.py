"""What an optimizer keeps: slots, such as momenta, of each variable, and what is its own, such as the count of updates.

::

    optimizer.variables     iterations    learning rate    momentum of v    velocity of v    momentum of w    …
    number and variable     0             (with a push)    0 of v           1 of v           0 of w

The chief's optimizer is built as Keras builds it, for whole variables, and a server's likewise, for the shards that are
there. So a slot is cut, placed and put together as its variable is, and to the session and the servers it is one more
variable: what the chief restores comes to the servers, what it saves comes from there. Workers have no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from choros.training.keras_internals import accumulators, apply_count, learning_rate_of

__all__ = ["Slots"]


@final
class Slots:
    """What ``optimizer`` keeps.

    Iterating gives triples: a number, the variable it belongs to, ``None`` for what is the optimizer's own, and the
    variable that is kept. The numbers of one variable's slots count from 0, in the order in which they were made.

    Args:
        optimizer: not built yet.

    Attributes:
        optimizer: the one given.

    Example:
        >>> import keras
        >>> optimizer, kernel = keras.optimizers.Adam(), keras.Variable([1.0, 2.0])
        >>> slots = Slots(optimizer)
        >>> slots.build([kernel], optimizer.build)
        >>> [(index, variable is kernel) for index, variable, _ in slots]
        [(0, True), (1, True), (0, False)]
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._made: list[tuple[Any, list[Any]]] = []

    def build(self, variables: Sequence[Any], own: Callable[[Any], None]) -> None:
        """Builds the optimizer by its ``own`` method, and sees what it makes of which variable."""
        noting = _Noting(variables, self.optimizer)
        own(noting)
        self._made = [(variable, noting.made[id(variable)]) for variable in variables]

    def __iter__(self) -> Iterator[tuple[int, Any, Any]]:
        optimizer = self.optimizer
        # Gradients are accumulated on the worker.
        done = {id(learning_rate_of(optimizer)), *map(id, accumulators(optimizer))}
        for variable, made in self._made:
            slots = [slot for slot in made if id(slot) not in done]
            yield from ((index, variable, slot) for index, slot in enumerate(slots))
            done.update(map(id, slots))
        own = [kept for kept in optimizer.variables if id(kept) not in done and kept is not apply_count(optimizer)]
        yield from ((index, None, kept) for index, kept in enumerate([_Updates(optimizer), *own]))


@final
class _Noting(list[Any]):
    """Variables that know what an optimizer makes while it goes through them: many do so without a name for it."""

    def __init__(self, variables: Sequence[Any], optimizer: Any) -> None:
        super().__init__(variables)
        self._optimizer = optimizer
        self.made: dict[int, list[Any]] = {id(variable): [] for variable in variables}

    def __iter__(self) -> Iterator[Any]:
        for variable in super().__iter__():
            before = len(self._optimizer.variables)
            yield variable
            self.made[id(variable)] += self._optimizer.variables[before:]


@final
class _Updates:
    """An optimizer's count of updates, as a variable; with ``gradient_accumulation_steps`` it counts batches itself."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def value(self) -> Any:
        updates = self._optimizer.iterations
        return getattr(updates, "value", updates)

    def assign(self, updates: Any) -> None:
        apply_count(self._optimizer).assign(updates * (self._optimizer.gradient_accumulation_steps or 1))
