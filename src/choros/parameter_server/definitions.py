"""Definitions: what the chief sends to workers that lack an object, because they have not run the script so far.

::

    schedule(step, args) ─► pickled ─► refers to a model ─► its definition ─► refers to its optimizer ─► …
                                                                 │
    worker that serves ◄── Run(…, those it does not have) ───────┘
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, final

from choros.errors import ConfigError
from choros.parameter_server import closures
from choros.parameter_server.messages import Definition, Reference
from choros.parameter_server.session import ServerSession


@final
class Definitions:
    """The definitions of a job, each made when a scheduled function first refers to it."""

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
        """Pickles ``item``; returns the references in it as well."""
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
        revision = self._objects.revisions.get(reference, 0)
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

    def _pickle(self, reference: Reference) -> tuple[bytes, frozenset[Reference]]:
        tag, number = reference
        if tag == "dataset":
            dataset = self._datasets[number]
            return self.dumps(getattr(dataset, "python_function", dataset))
        if tag == "compiled":
            return self.dumps(self._compile_arguments(number))
        item = self._objects.resolve(reference)
        if tag == "metric":
            return self._dumps(item, lambda part: None if part is item else self._reference(part))
        return self._created(item)

    def _compile_arguments(self, number: int) -> tuple[Any, ...]:
        """Returns what ``compile_copy`` takes; an optimizer's name is replaced by the optimizer created."""
        from choros.training.keras_internals.models import layers_of

        model = self._objects.resolve(("created", number))
        call = self._objects.last_compile(number)
        if call is None:
            raise ConfigError(f"{model.name!r} is not compiled.")
        if call.get("optimizer") is not None and getattr(model, "optimizer", None) is not None:
            call = call.replaced(optimizer=model.optimizer)
        return call.bound.args, call.bound.kwargs, tuple(layer.trainable for layer in layers_of(model))

    def _created(self, item: Any) -> tuple[bytes, frozenset[Reference]]:
        """Pickles an optimizer, and its variables without weight decay; or a model, and where its weights are."""
        import keras

        if isinstance(item, keras.optimizers.Optimizer):
            created = item, self._session.undecayed(item)
            return self._dumps(created, lambda part: None if part is item else self._reference(part))
        shared = self._objects.shared_layers(item)

        def reference(part: Any) -> Reference | None:
            if isinstance(part, (keras.Layer, keras.Variable)):
                return shared.get(id(part))
            return self._reference(part)

        return self._dumps((item, self._session.placement_of(item)), reference)

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
