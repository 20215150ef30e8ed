"""What the layers above need of a framework's arrays, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayAdapter", "ArrayFunction", "ArraySpec", "HostFunction"]

HostArray = NDArray[Any]
#: Takes and gives arrays in host memory.
HostFunction = Callable[[Sequence[HostArray]], Sequence[HostArray]]
#: Takes and gives arrays of the framework.
ArrayFunction = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of an array that is yet to come; ``None`` is a dimension known only then."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[np.generic]


class ArrayAdapter(ABC):
    """The primitives of one framework's arrays.

    ``to_host`` results may share memory with the array and must not be written to. Arrays given to
    ``from_host`` are handed over: the caller does not touch them again.

    Attributes:
        static_shapes: functions being compiled must know the shape of every result.
    """

    static_shapes: ClassVar[bool] = False

    @abstractmethod
    def to_host(self, array: Any) -> HostArray:
        """The array's values in host memory, without a copy where that can be."""

    @abstractmethod
    def from_host(self, host: HostArray, like: Any) -> Any:
        """``host`` as an array of this framework, on the device of ``like``."""

    @abstractmethod
    def spec(self, array: Any) -> ArraySpec:
        """The array's shape and dtype, known or not."""

    @abstractmethod
    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        """The array with ``dtype``; gradients flow through."""

    @abstractmethod
    def sum(self, array: Any) -> Any:
        """The sum of all elements; gradients flow through."""

    @abstractmethod
    def extent(self, array: Any, axis: int) -> Any:
        """The length of a dimension as an integer array: in a compiled function, known when it runs."""

    def is_symbolic(self, arrays: Sequence[Any]) -> bool:
        """Whether these stand for values that are computed later, in a compiled function."""
        del arrays
        return False

    def symbolic_call(self, function: HostFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
        """``host_call`` inside a function that is being compiled; of frameworks that have such."""
        raise NotImplementedError

    def host_call(self, function: HostFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
        """Calls ``function`` on the host: now, or each time the function being compiled is run.

        Args:
            function: takes host arrays that it must not write to, returns arrays that it hands over.
            arrays: what it is called with.
            outputs: what it returns.
        """
        if self.is_symbolic(arrays):
            return self.symbolic_call(function, arrays, outputs)
        results = function([self.to_host(array) for array in arrays])
        like = next(iter(arrays), None)
        return [self.from_host(np.asarray(result), like) for result in results]

    def with_gradient(self, forward: ArrayFunction, backward: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
        """``forward(arrays)``, through which gradients flow as ``backward`` says.

        Nothing is added where no gradient can be asked for: in frameworks without gradients, for instance.

        Args:
            forward: from arrays to results.
            backward: from the gradients with respect to the results to those with respect to ``arrays``. Integers have
                none: ``backward`` gets such a result itself, and gives ``None`` for such an array.
            arrays: what ``forward`` is called with.
        """
        del backward
        return list(forward(arrays))
