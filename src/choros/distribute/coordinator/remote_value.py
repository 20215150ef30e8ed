"""Values that are with workers, or on their way from there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from choros.arrays import adapter_of
from choros.arrays.numpy_arrays import NumpyArrays
from choros.errors import StrategyError

__all__ = ["PerWorkerDataset", "PerWorkerValues", "RemoteValue"]


@final
class RemoteValue:
    """The result of a scheduled function (``tf.distribute.experimental.coordinator.RemoteValue``)."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def get(self) -> Any:
        """What the function returned, as soon as it has; tensors are tensors.

        Raises:
            ClosureCancelled: it was not run, because another function failed before it.
            Exception: what the function raised.
        """
        return self._future.result()

    def fetch(self) -> Any:
        """``get`` with NumPy arrays in the place of tensors."""
        import keras

        return keras.tree.map_structure(_host, self.get())

    def set_result(self, result: Any) -> None:
        """The function is done."""
        self._future.set_result(result)

    def set_error(self, error: Exception) -> None:
        """The function failed, or will not be run."""
        self._future.set_exception(error)

    @property
    def ready(self) -> bool:
        """Whether ``get`` returns at once."""
        return self._future.done()


@dataclass(frozen=True)
class PerWorkerValues:
    """A value that each worker has its own of; passed to ``schedule``, a function gets that of its worker.

    Attributes:
        dataset: the number of a ``create_per_worker_dataset``.
        iterator: which iterator over it.
    """

    dataset: int
    iterator: int

    def __iter__(self) -> PerWorkerValues:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "next() of a per-worker iterator was called on the chief, which has no data of workers: pass the iterator "
            "to coordinator.schedule(fn, args=(iterator,)), and call next() in fn."
        )


@final
class PerWorkerDataset:
    """A data set that each worker makes for itself; ``iter`` of it is a ``PerWorkerValues``."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._iterators = 0

    def __iter__(self) -> PerWorkerValues:
        self._iterators += 1
        return PerWorkerValues(self._number, self._iterators)


def _host(leaf: Any) -> Any:
    adapter = adapter_of(leaf)
    return leaf if isinstance(adapter, NumpyArrays) else adapter.to_host(leaf)
