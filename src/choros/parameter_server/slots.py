"""Optimizer slots: the state per variable, such as momenta, and the optimizer's own, such as its iterations.

::

    optimizer.variables     iterations    learning rate    momentum of v    velocity of v    momentum of w    …
    number and variable     0             (with a push)    0 of v           1 of v           0 of w

Keras builds the chief's optimizer for whole variables, a server's for its shards: so slots are sharded and placed
like their variables. The chief sends what it restores and pulls what it saves; workers have no slots.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from choros.training.keras_internals.models import accumulators, apply_count, learning_rate_of


@final
class Slots:
    """An unbuilt optimizer's slots: yields index, variable (``None``: the optimizer's own) and slot, by creation.

    >>> import keras
    >>> optimizer, kernel = keras.optimizers.Adam(), keras.Variable([1.0, 2.0])
    >>> slots = Slots(optimizer)
    >>> slots.build([kernel], optimizer.build)
    >>> [(index, variable is kernel) for index, variable, _ in slots]
    [(0, True), (1, True), (0, False)]
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._created: list[tuple[Any, list[Any]]] = []

    def build(self, variables: Sequence[Any], own: Callable[[Any], None]) -> None:
        """Calls the optimizer's ``own`` build method, and records which slots it creates for which variable."""
        recording = _RecordingList(variables, self.optimizer)
        own(recording)
        self._created = [(variable, recording.created[id(variable)]) for variable in variables]

    def __iter__(self) -> Iterator[tuple[int, Any, Any]]:
        optimizer = self.optimizer
        # Gradients are accumulated on the worker.
        done = {id(learning_rate_of(optimizer)), *map(id, accumulators(optimizer))}
        for variable, created in self._created:
            slots = [slot for slot in created if id(slot) not in done]
            yield from ((index, variable, slot) for index, slot in enumerate(slots))
            done.update(map(id, slots))
        own = [slot for slot in optimizer.variables if id(slot) not in done and slot is not apply_count(optimizer)]
        yield from ((index, None, slot) for index, slot in enumerate([_Updates(optimizer), *own]))


@final
class _RecordingList(list[Any]):
    """A list of variables that records which slots an optimizer creates while iterating; many slots have no name."""

    def __init__(self, variables: Sequence[Any], optimizer: Any) -> None:
        super().__init__(variables)
        self._optimizer = optimizer
        self.created: dict[int, list[Any]] = {id(variable): [] for variable in variables}

    def __iter__(self) -> Iterator[Any]:
        for variable in super().__iter__():
            before = len(self._optimizer.variables)
            yield variable
            self.created[id(variable)] += self._optimizer.variables[before:]


@final
class _Updates:
    """An optimizer's count of updates as a variable; with ``gradient_accumulation_steps``, Keras counts batches."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def value(self) -> Any:
        updates = self._optimizer.iterations
        return getattr(updates, "value", updates)

    def assign(self, updates: Any) -> None:
        apply_count(self._optimizer).assign(updates * (self._optimizer.gradient_accumulation_steps or 1))
