"""The objects created in the scope, by number; references to them are valid in every process of a job: workers
that run the same script create them in the same order, and the chief sends definitions of the others (chief.py).
"""

from collections.abc import Iterator
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array
from choros.distribute.training import KerasCall
from choros.errors import ConfigError
from choros.parameter_server.messages import Reference, Report
from choros.parameter_server.slots import Slots
from choros.training.keras_internals.models import layers_of


@final
class ScopeObjects:
    """What functions refer to: models and optimizers, ``created``, in order of creation, the last ``compiled`` call of
    each model, where its weights are ``placed``, ``dataset``s of workers; on these, each ``function``. Numbers of each
    ``metric`` are separate, as Keras creates those of ``compile`` at the first batch, at a different point of the
    script in each process.
    """

    def __init__(self) -> None:
        self._known: dict[Reference, Any] = {}
        #: Of each of them, 0; of a model's ``compile``, the number of calls.
        self.revisions: dict[Reference, int] = {}
        #: The slots of optimizers, by their numbers; only on the chief, which has slots.
        self.slots: dict[int, Slots] = {}

    def add(self, tag: str, item: Any) -> int:
        """Adds what this process has created; returns its number."""
        number = len(self._of(tag))
        self.put((tag, number), item)
        return number

    def add_compile(self, model: Any, call: KerasCall) -> None:
        """Adds a call of a model's ``compile``."""
        for number, item in self._of("created"):
            if item is model:
                self.put(("compiled", number), call, self.revisions.get(("compiled", number), 0) + 1)

    def put(self, reference: Reference, item: Any, revision: int = 0) -> None:
        """Adds an object, such as a copy of what the chief has created."""
        self._known[reference], self.revisions[reference] = item, revision

    def _of(self, tag: str) -> list[tuple[int, Any]]:
        return [(number, self._known[each, number]) for each, number in sorted(self._known) if each == tag]

    def __iter__(self) -> Iterator[Any]:
        return (item for _, item in self._of("created"))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of models and optimizers: equal in processes that have run the same script."""
        return tuple(type(item).__name__ for item in self)

    def models(self) -> Iterator[tuple[int, Any]]:
        """Yields the fully built models with their numbers; one without ``build`` has only its layers' weights."""
        for number, item in self._of("created"):
            if isinstance(item, keras.Model) and all(
                layer.built or type(layer).build is keras.Layer.build for layer in layers_of(item)
            ):
                yield number, item

    def loss_scales(self) -> Iterator[tuple[int, Any]]:
        """Yields the built loss-scale optimizers with their numbers."""
        for number, item in self._of("created"):
            if isinstance(item, keras.optimizers.LossScaleOptimizer) and item.built:
                yield number, item

    def _known_metrics(self) -> Iterator[tuple[Reference, Any]]:
        """Yields the metrics of the models, then those that belong to no model."""
        seen = set()
        for number, model in self.models():
            for index, metric in enumerate(_parts(model, "metric")):
                seen.update({id(metric), *map(id, getattr(metric, "metrics", ()))})
                yield ("part", number, "metric", index), metric
        for index, metric in self._of("metric"):
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
        number_of = {id(item): number for number, item in self._of("created") if isinstance(item, keras.Model)}
        own = {id(layer): layer for layer in _parts(model, "layer") if layer is not model}
        within = {key: layer for key, layer in own.items() if key in number_of}
        inner = {id(part) for layer in within.values() for part in _parts(layer, "layer") if part is not layer}
        shared: dict[int, Reference] = {}
        for number, item in self._of("created"):
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
        for reference, known in self._known.items():
            if known is item:
                return reference
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
        whole = ("created" if part else tag, number)
        if whole not in self._known:
            raise ConfigError(
                f"a scheduled function uses object {number} of the scope, which this process does not have: create "
                "models, optimizers and metrics within `with strategy.scope():`, in the same order in every process."
            )
        item = self._known[whole]
        return _parts(item, part[0])[part[1]] if part else item


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
