"""Remote values: results of scheduled functions, and values that each worker has its own of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from choros.arrays import adapter_of
from choros.arrays.adapter import NumpyArrays
from choros.errors import StrategyError


@final
class RemoteValue:
    """The result of a scheduled function (``tf.distribute.experimental.coordinator.RemoteValue``)."""

    def __init__(
        self, future: Future[Any] | None = None, wait: Callable[[Future[Any]], Any] = Future[Any].result
    ) -> None:
        self._future = Future() if future is None else future
        self._wait = wait

    def get(self) -> Any:
        """Waits for the function and returns its result; tensors stay tensors.

        Raises:
            ClosureCancelled: the function was not run, because a function scheduled before it failed.
            EngineError: no worker has been connected for ``CHOROS_START_TIMEOUT`` seconds.
            Exception: the error that the function raised.
        """
        return self._wait(self._future)

    def fetch(self) -> Any:
        """Returns the result of ``get`` with tensors converted to NumPy arrays."""
        import keras

        return keras.tree.map_structure(_host, self.get())


@dataclass(frozen=True)
class PerWorkerValues:
    """A value that each worker has its own of; passed to ``schedule``, it is replaced by that of the worker.

    Attributes:
        dataset: the number of the ``create_per_worker_dataset`` call.
        iterator: the number of the iterator over that data set.
    """

    dataset: int
    iterator: int

    def __iter__(self) -> PerWorkerValues:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "next() of a per-worker iterator was called on the chief, which has no per-worker data: pass the iterator "
            "to coordinator.schedule(fn, args=(iterator,)), and call next() in fn."
        )


@final
class PerWorkerDataset:
    """The handle of a data set that each worker creates for itself; ``iter`` of it is a ``PerWorkerValues``."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._iterators = 0

    def __iter__(self) -> PerWorkerValues:
        self._iterators += 1
        return PerWorkerValues(self._number, self._iterators)


def _host(leaf: Any) -> Any:
    adapter = adapter_of(leaf)
    return leaf if isinstance(adapter, NumpyArrays) else adapter.to_host(leaf)
