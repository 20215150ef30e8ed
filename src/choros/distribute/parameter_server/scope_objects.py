"""What was made in the scope, by number: how the processes of a job mean the same model.

Every process runs the same script up to the first ``schedule`` or ``fit``, so all have made the same objects in the
same order. They do not travel: a number does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, final

from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError

__all__ = ["Reference", "ScopeObjects"]

#: ``("made", number)``, ``("metric", number)``, or ``("part", number, kind, index)`` for what a model consists of.
Reference = tuple[Any, ...]


@final
class ScopeObjects:
    """The models, optimizers and metrics made in a strategy's scope, in order of creation.

    Metrics are counted apart: Keras makes those that ``compile`` was given when it sees the first batch, which is not
    at the same time everywhere.
    """

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._metrics: list[Any] = []
        self._slots: dict[int, Slots] = {}

    def add(self, made: Any) -> int:
        """Gives the next number to a model or an optimizer."""
        self._made.append(made)
        return len(self._made) - 1

    def add_slots(self, optimizer: int, slots: Slots) -> None:
        """Takes in what the optimizer of this number keeps; on the chief, which has it."""
        self._slots[optimizer] = slots

    def add_metric(self, metric: Any) -> None:
        """Gives the next number to a metric."""
        self._metrics.append(metric)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of models and optimizers: equal where scripts have gone the same way."""
        return tuple(type(made).__name__ for made in self._made)

    def models(self) -> Iterator[tuple[int, Any]]:
        """The models that have all of their variables, with their numbers."""
        import keras

        from choros.training.keras_internals import layers_of

        for number, made in enumerate(self._made):
            if isinstance(made, keras.Model) and all(layer.built for layer in layers_of(made)):
                yield number, made

    def loss_scales(self) -> Iterator[tuple[int, Any]]:
        """The loss scales that have their variables, with their numbers."""
        import keras

        for number, made in enumerate(self._made):
            if isinstance(made, keras.optimizers.LossScaleOptimizer) and made.built:
                yield number, made

    def slots(self) -> Iterator[tuple[int, Slots]]:
        """What optimizers keep, with the optimizers' numbers."""
        yield from self._slots.items()

    def metrics(self) -> Iterator[tuple[Reference, Any]]:
        """The metrics of the models and those that belong to none."""
        seen = set()
        for number, model in self.models():
            for index, metric in enumerate(_parts(model, "metric")):
                seen.update({id(metric), *map(id, getattr(metric, "metrics", ()))})
                yield ("part", number, "metric", index), metric
        for index, metric in enumerate(self._metrics):
            if id(metric) not in seen:
                yield ("metric", index), metric

    def reference(self, item: Any) -> Reference | None:
        """How another process finds ``item``; ``None`` for what is no object of Keras and travels by value.

        Raises:
            ConfigError: an object of Keras that is not known.
        """
        if "keras" not in sys.modules:
            return None
        import keras

        if not isinstance(item, (keras.Layer, keras.Variable, keras.Metric, keras.optimizers.Optimizer)):
            return None
        for word, known in (("made", self._made), ("metric", self._metrics)):
            for number, made in enumerate(known):
                if made is item:
                    return (word, number)
        for number, model in self.models():
            for kind in ("layer", "variable", "metric"):
                for index, part in enumerate(_parts(model, kind)):
                    if part is item:
                        return ("part", number, kind, index)
        raise ConfigError(
            f"a scheduled function uses a {type(item).__name__} ({getattr(item, 'name', '?')!r}) that the workers do "
            "not have: make it, or the model that it is part of, within `with strategy.scope():`, before the first "
            "schedule() or fit()."
        )

    def resolve(self, reference: Reference) -> Any:
        """The object that another process means.

        Raises:
            ConfigError: there is none here.
        """
        word, number, *which = reference
        known = self._metrics if word == "metric" else self._made
        if number >= len(known):
            raise ConfigError(
                f"a scheduled function uses object {number} of the scope, but this process has made {len(known)}: "
                "models, optimizers and metrics are to be made within `with strategy.scope():`, before the first "
                "schedule() or fit(), up to which workers run the script."
            )
        return _parts(known[number], which[0])[which[1]] if word == "part" else known[number]


def _parts(model: Any, kind: str) -> list[Any]:
    from choros.training.keras_internals import layers_of

    match kind:
        case "layer":
            return layers_of(model)
        case "variable":
            return list(model.variables)
        case _:
            return list(model.metrics)
