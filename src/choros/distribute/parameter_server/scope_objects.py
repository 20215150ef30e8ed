"""The objects created in the scope, by number: references to them that are valid in every process of a job.

Every process runs the same script up to the first ``schedule`` or ``fit``, so all have created the same objects in the
same order. The objects are not sent, only their numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, final

from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError

__all__ = ["Reference", "ScopeObjects"]

#: ``("created", number)``, ``("metric", number)``, or ``("part", number, kind, index)`` for a part of a model.
Reference = tuple[Any, ...]


@final
class ScopeObjects:
    """The models, optimizers and metrics created in a strategy's scope, in order of creation.

    Metrics are numbered separately: Keras creates the metrics of ``compile`` at the first batch, which is at a
    different point of the script in each process.
    """

    def __init__(self) -> None:
        self._created: list[Any] = []
        self._metrics: list[Any] = []
        self._slots: dict[int, Slots] = {}

    def add(self, item: Any) -> int:
        """Adds a model or an optimizer; returns its number."""
        self._created.append(item)
        return len(self._created) - 1

    def add_slots(self, optimizer: int, slots: Slots) -> None:
        """Adds the slots of the optimizer with this number; only on the chief, which has slots."""
        self._slots[optimizer] = slots

    def add_metric(self, metric: Any) -> None:
        """Adds a metric."""
        self._metrics.append(metric)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._created)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of models and optimizers: equal in processes that have run the same script."""
        return tuple(type(item).__name__ for item in self._created)

    def models(self) -> Iterator[tuple[int, Any]]:
        """Yields the fully built models with their numbers."""
        import keras

        from choros.training.keras_internals import layers_of

        for number, item in enumerate(self._created):
            if isinstance(item, keras.Model) and all(layer.built for layer in layers_of(item)):
                yield number, item

    def loss_scales(self) -> Iterator[tuple[int, Any]]:
        """Yields the built loss-scale optimizers with their numbers."""
        import keras

        for number, item in enumerate(self._created):
            if isinstance(item, keras.optimizers.LossScaleOptimizer) and item.built:
                yield number, item

    def slots(self) -> Iterator[tuple[int, Slots]]:
        """Yields the optimizers' slots with the optimizers' numbers."""
        yield from self._slots.items()

    def metrics(self) -> Iterator[tuple[Reference, Any]]:
        """Yields the metrics of the models, then those that belong to no model."""
        seen = set()
        for number, model in self.models():
            for index, metric in enumerate(_parts(model, "metric")):
                seen.update({id(metric), *map(id, getattr(metric, "metrics", ()))})
                yield ("part", number, "metric", index), metric
        for index, metric in enumerate(self._metrics):
            if id(metric) not in seen:
                yield ("metric", index), metric

    def reference(self, item: Any) -> Reference | None:
        """Returns the reference by which another process finds ``item``; ``None`` if it is no Keras object.

        Raises:
            ConfigError: ``item`` is a Keras object that was not created in the scope.
        """
        if "keras" not in sys.modules:
            return None
        import keras

        if not isinstance(item, (keras.Layer, keras.Variable, keras.Metric, keras.optimizers.Optimizer)):
            return None
        for tag, known in (("created", self._created), ("metric", self._metrics)):
            for number, candidate in enumerate(known):
                if candidate is item:
                    return (tag, number)
        for number, model in self.models():
            for kind in ("layer", "variable", "metric"):
                for index, part in enumerate(_parts(model, kind)):
                    if part is item:
                        return ("part", number, kind, index)
        raise ConfigError(
            f"a scheduled function uses a {type(item).__name__} ({getattr(item, 'name', '?')!r}) that the workers do "
            "not have: create it, or the model that it is part of, within `with strategy.scope():`, before the first "
            "schedule() or fit()."
        )

    def resolve(self, reference: Reference) -> Any:
        """Returns the object that ``reference`` denotes.

        Raises:
            ConfigError: this process has not created it.
        """
        tag, number, *part = reference
        known = self._metrics if tag == "metric" else self._created
        if number >= len(known):
            raise ConfigError(
                f"a scheduled function uses object {number} of the scope, but this process has created {len(known)}: "
                "create models, optimizers and metrics within `with strategy.scope():`, before the first "
                "schedule() or fit(), up to which workers run the script."
            )
        return _parts(known[number], part[0])[part[1]] if tag == "part" else known[number]


def _parts(model: Any, kind: str) -> list[Any]:
    from choros.training.keras_internals import layers_of

    match kind:
        case "layer":
            return layers_of(model)
        case "variable":
            return list(model.variables)
        case _:
            return list(model.metrics)
