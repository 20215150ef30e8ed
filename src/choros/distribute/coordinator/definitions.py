"""Definitions: what the chief sends to workers that lack an object, because they have not run the script so far.

::

    schedule(step, args) ─► pickled ─► refers to a model ─► its definition ─► refers to its optimizer ─► …
                                                                 │
    worker that serves ◄── Run(…, those it does not have) ───────┘
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from choros.distribute.coordinator import closures
from choros.distribute.coordinator.closures import Reference
from choros.distribute.fit.call import KerasCall
from choros.distribute.parameter_server.session import ServerSession
from choros.errors import ConfigError

__all__ = ["Definition", "Definitions", "missing"]


@dataclass(frozen=True)
class Definition:
    """How a worker creates an object of the scope or a data set, or compiles a model.

    Attributes:
        reference: ``("created", number)``, ``("compiled", number)``, ``("metric", number)`` or ``("dataset", number)``.
        revision: of ``compile``, the number of calls; of others, 0.
        pickled: the object; empty if it cannot be sent.
        error: why it cannot be sent.
    """

    reference: Reference
    revision: int
    pickled: bytes
    error: str = ""


def missing(definitions: Iterable[Definition], known: Mapping[Reference, int]) -> list[Definition]:
    """Returns the definitions that a worker with the revisions ``known`` lacks, in their order.

    Example:
        >>> model, compiled = Definition(("created", 0), 0, b"made"), Definition(("compiled", 0), 2, b"compiled")
        >>> [each.reference for each in missing([model, compiled], {("created", 0): 0, ("compiled", 0): 1})]
        [('compiled', 0)]
    """
    return [each for each in definitions if known.get(each.reference, -1) < each.revision]


@final
class Definitions:
    """The definitions of a job, each made when a scheduled function first refers to it.

    Args:
        session: the chief's server session.
        reference: returns the reference that replaces an object.
    """

    def __init__(self, session: ServerSession, reference: Callable[[Any], Reference | None]) -> None:
        self._session = session
        self._objects = session.objects
        self._reference = reference
        self._datasets: list[Any] = []
        self._made: dict[Reference, tuple[Definition, frozenset[Reference]]] = {}

    def add_dataset(self, dataset: Any) -> int:
        """Adds a data set of workers, or the function that creates it; returns its number."""
        self._datasets.append(dataset)
        return len(self._datasets) - 1

    def dumps(self, item: Any) -> tuple[bytes, frozenset[Reference]]:
        """Pickles ``item``; returns the references in it as well.

        Raises:
            ConfigError: it cannot be pickled.
        """
        return self._dumps(item, self._reference)

    def of(self, references: Iterable[Reference]) -> tuple[Definition, ...]:
        """Returns the definitions of what ``references`` refer to, each after those that it needs."""
        ordered: dict[Reference, Definition | None] = {}
        for reference in sorted(references):
            self._add(reference, ordered)
        return tuple(each for each in ordered.values() if each is not None)

    def _add(self, reference: Reference, ordered: dict[Reference, Definition | None]) -> None:
        if reference in ordered:
            return
        ordered[reference] = None  # it may refer to itself
        definition, needs = self._definition(reference)
        for need in sorted(needs):
            self._add(need, ordered)
        del ordered[reference]
        ordered[reference] = definition
        if reference[0] == "created" and self._objects.last_compile(reference[1]) is not None:
            self._add(("compiled", reference[1]), ordered)

    def _definition(self, reference: Reference) -> tuple[Definition, frozenset[Reference]]:
        revision = self._revision(reference)
        made = self._made.get(reference)
        if made is None or made[0].revision < revision:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Keras': of lambdas in configurations
                    pickled, needs = self._pickle(reference)
                made = Definition(reference, revision, pickled), needs
            except Exception as error:  # noqa: BLE001  (a user's get_config may raise anything; most workers need none)
                made = Definition(reference, revision, b"", str(error)), frozenset()
            self._made[reference] = made
        return made

    def _revision(self, reference: Reference) -> int:
        if reference[0] != "compiled":
            return 0
        compiled = self._objects.last_compile(reference[1])
        return 0 if compiled is None else compiled[0]

    def _pickle(self, reference: Reference) -> tuple[bytes, frozenset[Reference]]:
        tag, number = reference
        if tag == "dataset":
            dataset = self._datasets[number]
            return self.dumps(getattr(dataset, "python_function", dataset))
        if tag == "compiled":
            return self.dumps(self._compile_recipe(number))
        item = self._objects.resolve(reference)
        if tag == "metric":
            return self._dumps(item, lambda part: None if part is item else self._reference(part))
        return self._created(item)

    def _compile_recipe(self, number: int) -> Any:
        from choros.distribute.parameter_server.recipes import CompileRecipe
        from choros.training.keras_internals import layers_of

        model = self._objects.resolve(("created", number))
        compiled = self._objects.last_compile(number)
        if compiled is None:
            raise ConfigError(f"{model.name!r} is not compiled.")
        call: KerasCall = compiled[1]
        if call.get("optimizer") is not None and getattr(model, "optimizer", None) is not None:
            call = call.replaced(optimizer=model.optimizer)
        return CompileRecipe(call.args, call.kwargs, tuple(layer.trainable for layer in layers_of(model)))

    def _created(self, item: Any) -> tuple[bytes, frozenset[Reference]]:
        import keras

        from choros.distribute.parameter_server.recipes import ModelRecipe, OptimizerCopy

        if isinstance(item, keras.optimizers.Optimizer):
            recipe = OptimizerCopy(item, self._session.undecayed(item))
            return self._dumps(recipe, lambda part: None if part is item else self._reference(part))
        shared = self._objects.shared_layers(item)

        def reference(part: Any) -> Reference | None:
            if isinstance(part, (keras.Layer, keras.Variable)):
                return shared.get(id(part))
            return self._reference(part)

        return self._dumps(ModelRecipe(item, self._session.placed(item)), reference)

    def _dumps(self, item: Any, reference: Callable[[Any], Reference | None]) -> tuple[bytes, frozenset[Reference]]:
        found: set[Reference] = set()

        def collecting(part: Any) -> Reference | None:
            result = reference(part)
            if result is not None:
                match result:
                    case ("part", number, *_):
                        found.add(("created", number))
                    case ("per_worker", dataset, _):
                        found.add(("dataset", dataset))
                    case ("created" | "metric", _):
                        found.add(result)
            return result

        return closures.dumps(item, collecting), frozenset(found)
