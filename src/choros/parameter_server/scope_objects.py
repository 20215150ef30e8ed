"""The objects created in the scope, by number; references to them are valid in every process of a job: workers
that run the same script create them in the same order, and the chief sends recipes of the others (recipes.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array
from choros.distribute.fit.training import KerasCall
from choros.errors import ConfigError
from choros.parameter_server.messages import Reference, Report
from choros.parameter_server.slots import Slots
from choros.training.keras_internals.models import layers_of


@final
class ScopeObjects:
    """The objects of a scope in order of creation; metrics are numbered separately, as Keras creates those of
    ``compile`` at the first batch, at a different point of the script in each process.
    """

    def __init__(self) -> None:
        self._created: dict[int, Any] = {}
        self._metrics: dict[int, Any] = {}
        #: The slots of optimizers, by their numbers; only on the chief, which has slots.
        self.slots: dict[int, Slots] = {}
        self._compiled: dict[int, tuple[int, KerasCall]] = {}

    def add(self, item: Any) -> int:
        """Adds a model or an optimizer; returns its number."""
        number = len(self._created)
        self._created[number] = item
        return number

    def add_metric(self, metric: Any) -> None:
        """Adds a metric."""
        self._metrics[len(self._metrics)] = metric

    def add_compile(self, model: Any, call: KerasCall) -> None:
        """Adds a call of a model's ``compile``."""
        for number, item in self._created.items():
            if item is model:
                calls, _ = self._compiled.get(number, (0, None))
                self._compiled[number] = calls + 1, call

    def put(self, reference: Reference, item: Any) -> None:
        """Adds the copy of an object that the chief has created."""
        tag, number = reference
        (self._metrics if tag == "metric" else self._created)[number] = item

    def __iter__(self) -> Iterator[Any]:
        return iter(self._created.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of models and optimizers: equal in processes that have run the same script."""
        return tuple(type(item).__name__ for item in self._created.values())

    @property
    def revisions(self) -> Mapping[Reference, int]:
        """References to what this process has created; of a model's ``compile``, the number of calls."""
        return {
            **{("created", number): 0 for number in self._created},
            **{("compiled", number): calls for number, (calls, _) in self._compiled.items()},
            **{("metric", number): 0 for number in self._metrics},
        }

    def last_compile(self, number: int) -> KerasCall | None:
        """Returns the last call of a model's ``compile``; ``None`` without any."""
        return self._compiled[number][1] if number in self._compiled else None

    def models(self) -> Iterator[tuple[int, Any]]:
        """Yields the fully built models with their numbers; one without ``build`` has only its layers' weights."""
        for number, item in sorted(self._created.items()):
            if isinstance(item, keras.Model) and all(
                layer.built or type(layer).build is keras.Layer.build for layer in layers_of(item)
            ):
                yield number, item

    def loss_scales(self) -> Iterator[tuple[int, Any]]:
        """Yields the built loss-scale optimizers with their numbers."""
        for number, item in sorted(self._created.items()):
            if isinstance(item, keras.optimizers.LossScaleOptimizer) and item.built:
                yield number, item

    def _known_metrics(self) -> Iterator[tuple[Reference, Any]]:
        """Yields the metrics of the models, then those that belong to no model."""
        seen = set()
        for number, model in self.models():
            for index, metric in enumerate(_parts(model, "metric")):
                seen.update({id(metric), *map(id, getattr(metric, "metrics", ()))})
                yield ("part", number, "metric", index), metric
        for index, metric in sorted(self._metrics.items()):
            if id(metric) not in seen:
                yield ("metric", index), metric

    def reset_metrics(self) -> None:
        """Resets all metrics: before a worker runs a function."""
        for _, metric in self._known_metrics():
            metric.reset_state()

    def count_metrics(self) -> Report:
        """Returns the metrics that changed since ``reset_metrics``."""
        counted = {reference: [host(v) for v in metric.variables] for reference, metric in self._known_metrics()}
        return {reference: values for reference, values in counted.items() if any(np.any(value) for value in values)}

    def add_metrics(self, report: Report) -> None:
        """Adds a worker's report to the metrics here, the chief's."""
        for reference, values in report.items():
            for variable, value in zip(self.resolve(reference).variables, values, strict=True):
                summed = variable.aggregation == "sum"
                variable.assign(host(variable) + value if summed else value)

    def shared_layers(self, model: Any) -> dict[int, Reference]:
        """Returns references by ``id`` to layers that other models share: inner models, and layers of earlier ones."""
        number_of = {id(item): number for number, item in self._created.items() if isinstance(item, keras.Model)}
        own = {id(layer): layer for layer in _parts(model, "layer") if layer is not model}
        within = {key: layer for key, layer in own.items() if key in number_of}
        inner = {id(part) for layer in within.values() for part in _parts(layer, "layer") if part is not layer}
        shared: dict[int, Reference] = {}
        for number, item in sorted(self._created.items()):
            if isinstance(item, keras.Model) and number < number_of[id(model)]:
                parts = _parts(item, "layer")
                if not any(part is model for part in parts):
                    found = {id(part): ("part", number, "layer", index) for index, part in enumerate(parts)}
                    shared = {**found, **shared}
        shared.update({key: ("created", number_of[key]) for key in within})
        return {key: shared[key] for key in own if key in shared and key not in inner}

    def reference(self, item: Any) -> Reference | None:
        """Returns the reference that finds ``item`` in other processes; ``None`` if it is no Keras object, or a layer
        without weights that is no part of a model; ConfigError if it was not created in the scope.
        """
        if not isinstance(item, (keras.Layer, keras.Variable, keras.Metric, keras.optimizers.Optimizer)):
            return None
        for tag, known in (("created", self._created), ("metric", self._metrics)):
            for number, candidate in known.items():
                if candidate is item:
                    return (tag, number)
        for number, model in self.models():
            for kind in ("layer", "variable", "metric"):
                for index, part in enumerate(_parts(model, kind)):
                    if part is item:
                        return ("part", number, kind, index)
        if isinstance(item, keras.Layer) and not isinstance(item, keras.Model) and item.built and not item.weights:
            return None  # such as a StringLookup, which is sent with its vocabulary
        raise ConfigError(
            f"a scheduled function uses a {type(item).__name__} ({getattr(item, 'name', '?')!r}) that the workers do "
            "not have: create it, or the model that it is part of, within `with strategy.scope():`."
        )

    def resolve(self, reference: Reference) -> Any:
        """Returns the object that ``reference`` denotes; ConfigError if this process has not created it."""
        tag, number, *part = reference
        known = self._metrics if tag == "metric" else self._created
        if number not in known:
            raise ConfigError(
                f"a scheduled function uses object {number} of the scope, which this process does not have: create "
                "models, optimizers and metrics within `with strategy.scope():`, in the same order in every process."
            )
        return _parts(known[number], part[0])[part[1]] if tag == "part" else known[number]


def layers_in_order(model: Any) -> list[Any]:
    """Its layers, in the order of each copy: without inputs, which models have in common here, but not their copies."""
    return [layer for layer in layers_of(model) if not isinstance(layer, keras.layers.InputLayer)]


def _parts(model: Any, kind: str) -> list[Any]:
    match kind:
        case "layer":
            return layers_in_order(model)
        case "variable":
            return list(model.variables)
        case _:
            return list(model.metrics)


def host(variable: Any) -> Array:
    """Returns a copy of a variable's current value, independent of later changes of the variable."""
    value = getattr(variable, "value", variable)
    return np.array(adapter_of(value).to_host(value))
