"""Checkpoints of a Keras model and its optimizer in one file, on every framework."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.errors import ConfigError

__all__ = ["KerasCheckpoint"]


@final
class KerasCheckpoint:
    """The weights of a model and the state of its optimizer, for a ``PreemptionCheckpointHandler``.

    The file is in NumPy's ``.npz`` format. It does not contain the seeds of random layers, nor the metrics.

    Args:
        model: a built model.
        optimizer: the optimizer that trains it; by default the one with which it was compiled.

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
                f"KerasCheckpoint({model.name!r}): this model has no variables yet, so none can be restored: give it "
                "a keras.Input, or call model.build(…), first."
            )
        if self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(model.trainable_variables)

    def save(self, path: str) -> None:
        """Writes the file ``path``."""
        values = {name: variable.value for name, variable in self._variables().items()}
        arrays: dict[str, Any] = {name: adapter_of(value).to_host(value) for name, value in values.items()}
        with open(path, "wb") as file:
            np.savez(file, **arrays)

    def restore(self, path: str) -> None:
        """Overwrites the variables with those of the file ``path``.

        A process without the optimizer's state, as under ``CentralStorageStrategy``, does not restore that state.

        Raises:
            ConfigError: the file is of another model or optimizer.
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
                    f"{path} does not match {self._model.name!r} and its optimizer: the shape of {name} "
                    f"is {found.get(name, 'missing')} in the file, and {expected.get(name, 'missing')} here."
                )
        for name, variable in variables.items():
            variable.assign(_of_dtype(saved[name], variable))

    def _variables(self) -> dict[str, Any]:
        """Returns the variables by index: Keras' generated names depend on other objects of the program."""
        of_optimizer = [] if self._optimizer is None else self._optimizer.variables
        return {
            **{f"weight {index}": variable for index, variable in enumerate(self._model.weights)},
            **{f"optimizer {index}": variable for index, variable in enumerate(of_optimizer)},
        }


def _of_dtype(array: NDArray[Any], variable: Any) -> NDArray[Any]:
    # NumPy's format has no bfloat16: such arrays are loaded as plain bytes.
    return array.view(np.dtype(variable.dtype)) if array.dtype.kind == "V" else array
