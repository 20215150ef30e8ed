"""A Keras model and its optimizer in one file, on every framework."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.errors import ConfigError

__all__ = ["KerasCheckpoint"]


@final
class KerasCheckpoint:
    """The weights of a model and the state of its optimizer, as a ``PreemptionCheckpointHandler`` wants them.

    What it writes is a ``.npz`` file of NumPy. The seeds of random layers and the metrics are not in it.

    Args:
        model: built.
        optimizer: the one that trains it; by default that with which it was compiled.

    Raises:
        ConfigError: the model has no variables yet.

    Example:
        >>> import keras, os, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> checkpoint = KerasCheckpoint(model, keras.optimizers.Adam())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpoint.save(os.path.join(directory, "checkpoint"))
        ...     checkpoint.restore(os.path.join(directory, "checkpoint"))
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self._model = model
        self._optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if not model.built:
            raise ConfigError(
                f"KerasCheckpoint({model.name!r}): this model has no variables yet, so there are none to restore: give "
                "it a keras.Input, or call model.build(…), before."
            )
        if self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(model.trainable_variables)

    def save(self, path: str) -> None:
        """Writes the file ``path``."""
        values = {name: variable.value for name, variable in self._variables().items()}
        arrays = {name: adapter_of(value).to_host(value) for name, value in values.items()}
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    def restore(self, path: str) -> None:
        """Overwrites the variables with those of the file ``path``.

        A process without the optimizer's state, as ``CentralStorageStrategy`` has, takes none.

        Raises:
            ConfigError: they are another model's or another optimizer's.
        """
        from choros.training.distributed_optimizer import reducer_of

        variables = self._variables()
        with np.load(path, allow_pickle=False) as file:
            saved = dict(file)
        reducer = reducer_of(self._optimizer)
        if reducer is not None and not reducer.has_state:
            saved = {name: array for name, array in saved.items() if name in variables}
        expected = {name: tuple(variable.shape) for name, variable in variables.items()}
        found = {name: array.shape for name, array in saved.items()}
        for name in sorted({*expected, *found}):
            if expected.get(name) != found.get(name):
                raise ConfigError(
                    f"{path} is of another model or optimizer than those of {self._model.name!r}: the shape of {name} "
                    f"is {found.get(name, 'missing')} in the file, and {expected.get(name, 'missing')} here."
                )
        for name, variable in variables.items():
            variable.assign(_of_dtype(saved[name], variable))

    def _variables(self) -> dict[str, Any]:
        """By their numbers: the names that Keras makes depend on what else the program has made."""
        of_optimizer = [] if self._optimizer is None else self._optimizer.variables
        return {
            **{f"weight {index}": variable for index, variable in enumerate(self._model.weights)},
            **{f"optimizer {index}": variable for index, variable in enumerate(of_optimizer)},
        }


def _of_dtype(array: NDArray[Any], variable: Any) -> NDArray[Any]:
    # NumPy's format does not know bfloat16 by name: such arrays come back as plain bytes.
    return array.view(np.dtype(variable.dtype)) if array.dtype.kind == "V" else array
