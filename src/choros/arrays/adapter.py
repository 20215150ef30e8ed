"""The adapter interface: the primitives of a framework's arrays that the other modules need; and an array's adapter.

Of an error that a function on the host raises, which compiled code calls, a framework passes on only the text, in an
exception of its own. That exception becomes one of the host's class, too::

    host       MismatchError("… rank 0: … rank 1: …")     remember() keeps it
                 │ its text
    framework  JaxRuntimeError("INTERNAL: … rank 0: …")   recognize_errors(): contains the text of one that is kept
                 │
    caller     an instance of both

The framework's constructor, the only code of Python between the two, creates instances of a subclass of both.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from choros.errors import ChorosError, ConfigError

HostArray = NDArray[Any]
#: From host arrays to host arrays; see ``host_call``.
HostFunction = Callable[..., Sequence[HostArray]]
#: A shape and a dtype.
ArrayLayout = tuple[tuple[int, ...], np.dtype[np.generic]]
#: From arrays of the framework to arrays of the framework.
ArrayFunction = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class ArraySpec:
    """The shape, ``None`` where known only when computed, and dtype; ``batched``: one per element of ``jax.vmap``."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[np.generic]
    batched: bool = True


class ArrayAdapter(ABC):
    """The primitives of one framework's arrays.

    ``to_host`` results may share memory with the array and must not be written to. Arrays given to
    ``from_host`` are owned by the result: the caller does not use them again.

    Attributes:
        static_shapes: whether compiled functions must know the shape of every result.
        widest_float: the floating-point dtype that represents most integers.
    """

    static_shapes: ClassVar[bool] = False
    widest_float: ClassVar[np.dtype[np.generic]] = np.dtype(np.float64)

    @abstractmethod
    def to_host(self, array: Any) -> HostArray:
        """Returns the array in host memory, without a copy where possible."""

    def fingerprint(self, array: Any) -> bytes:
        """Returns ``fingerprint`` of the array's bytes, of which little is copied to the host."""
        return fingerprint(self.to_host(array))

    @abstractmethod
    def from_host(self, host: HostArray, like: Any) -> Any:
        """Returns ``host`` as an array of this framework, on the device of ``like``."""

    @abstractmethod
    def spec(self, array: Any) -> ArraySpec:
        """Returns the array's dtype and its shape as far as it is known."""

    @abstractmethod
    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        """Returns the array cast to ``dtype``; differentiable."""

    def sum(self, array: Any) -> Any:
        """Returns the sum of all elements; differentiable."""
        return array.sum()

    @abstractmethod
    def zeros_like(self, array: Any) -> Any:
        """Returns zeros of the same shape and dtype, on the same device."""

    def stop_gradient(self, array: Any) -> Any:
        """Returns the array as a constant, through which no gradient flows."""
        return array

    def extent(self, array: Any, axis: int) -> Any:
        """Returns the length of a dimension as an integer array, which compiled functions may compute at run time."""
        return self.from_host(np.asarray(np.shape(array)[axis]), array)

    def rows_of(self, array: Any) -> tuple[Any, Any, Any] | None:
        """Returns the row indices, the rows and the dense shape of a sparse gradient; ``None`` for any other array."""
        del array
        return None

    def is_of_batch(self, array: Any) -> bool | None:
        """Whether an array follows from the inputs of a function that is being compiled; ``None``: not known."""
        del array
        return None

    def from_rows(self, indices: Any, values: Any, shape: Any) -> Any:
        """Returns a sparse gradient, for frameworks that have such; ``shape`` may be as ``rows_of`` returned it."""
        raise NotImplementedError

    def to_dense(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Returns a sparse gradient of an array of ``shape`` as a dense one; any other array itself."""
        del shape
        return array

    def is_symbolic(self, arrays: Sequence[Any]) -> bool:
        """Returns whether ``arrays`` are symbolic: inputs of a function that is being compiled."""
        del arrays
        return False

    def host_call(
        self,
        function: HostFunction,
        arrays: Sequence[Any],
        outputs: Sequence[ArraySpec],
        *,
        replaced: int = 0,
        keeps: bool = False,
    ) -> list[Any]:
        """Calls ``function`` on the host: now, or in each run of the function that is being compiled.

        Args:
            function: takes host arrays, which it must not write to, and returns host arrays. It must not keep any of
                them: their memory may be the framework's. Under ``jax.vmap`` its arguments and ``batched`` results have
                one more dimension, the last one.
            arrays: its arguments.
            outputs: the shapes and dtypes of its results.
            replaced: how many of its first results replace as many of its last arguments, of the same shapes and
                dtypes, which are used no more: it may be given arrays for these results, too, or ``None``.
            keeps: whether it needs the values of those arguments until it returns, so that results have other memory.
        """
        del outputs, replaced, keeps
        results = function([self.to_host(array) for array in arrays])
        like = next(iter(arrays), None)
        return [self.from_host(np.asarray(result), like) for result in results]

    def with_gradient(self, forward: ArrayFunction, backward: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
        """Returns ``forward(arrays)`` with the gradient rule ``backward``.

        The rule is ignored where no gradient can be computed, such as in frameworks without gradients.

        Args:
            forward: from arrays to results.
            backward: from the gradients with respect to the results to those with respect to ``arrays``. Integers have
                none: ``backward`` receives such a result itself, and returns ``None`` for such an array.
            arrays: the arguments of ``forward``.
        """
        del backward
        return list(forward(arrays))


@final
class NumpyArrays(ArrayAdapter):
    """Arrays in host memory; the results for Python numbers are Python numbers."""

    def to_host(self, array: Any) -> HostArray:
        """``numpy.asarray``."""
        return np.asarray(array)

    def from_host(self, host: HostArray, like: Any) -> Any:
        """Returns ``host`` itself, or a Python number if ``like`` is one."""
        return host.item() if isinstance(like, (bool, int, float)) and host.ndim == 0 else host

    def spec(self, array: Any) -> ArraySpec:
        """Shape and dtype."""
        host = np.asarray(array)
        return ArraySpec(host.shape, host.dtype)

    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        """``ndarray.astype``."""
        return np.asarray(array).astype(dtype, copy=False)

    def sum(self, array: Any) -> Any:
        """``numpy.sum``."""
        return np.sum(array)

    def zeros_like(self, array: Any) -> Any:
        """``numpy.zeros_like``."""
        return np.zeros_like(array)


class DeviceArrayAdapter(ArrayAdapter):
    """The primitives of a framework whose arrays are reduced on their device, without host staging."""

    @abstractmethod
    def device_call(self, function: ArrayFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
        """``host_call`` of a function of this framework's own arrays, computed and on their device.

        Args:
            function: takes arrays, which it must not write to; returns such, or host arrays.
            arrays: as for ``host_call``.
            outputs: likewise.
        """

    @abstractmethod
    def pack(
        self,
        arrays: Sequence[Any] | None,
        sizes: Sequence[int],
        dtype: np.dtype[np.generic],
        factor: float,
        device: Any,
    ) -> Any:
        """Returns a new vector that has ``arrays`` times ``factor`` one after the other; nothing else has its memory.

        They are scaled before they become narrower: a sum that is not scaled may overflow.

        Args:
            arrays: with gradients or without; ``None`` for zeros.
            sizes: their numbers of elements.
            dtype: that of the vector.
            factor: multiplies them in float32 at least.
            device: where they are: a ``type`` and an ``index``.
        """

    @abstractmethod
    def unpack(self, vector: Any, layout: Sequence[ArrayLayout], factor: float) -> list[Any]:
        """Returns the arrays of ``layout`` in ``vector``, which is not used again, times ``factor``."""

    @abstractmethod
    def buffer(self, vector: Any, device: Any) -> Any:
        """Returns a vector from ``pack`` as collectives on devices take it (``DeviceLink``), which overwrite it."""


#: The package of an array's class → the framework.
_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax"}
_FRAMEWORKS = ("torch", "tensorflow", "jax")
#: The adapters that are in use.
_adapters: dict[str, ArrayAdapter] = {"numpy": NumpyArrays()}


def framework_adapter(framework: str) -> ArrayAdapter:
    """Returns the adapter of ``tensorflow``, ``torch``, ``jax`` or ``numpy``; imports the framework."""
    if framework not in _adapters:
        if framework not in _FRAMEWORKS:
            raise ConfigError(f"{framework!r} is not a supported framework: expected one of {', '.join(_FRAMEWORKS)}.")
        _adapters[framework] = import_module(f"choros.arrays.{framework}_arrays").ADAPTER
    return _adapters[framework]


def device_adapter(framework: str) -> DeviceArrayAdapter:
    """Returns the adapter of a framework whose arrays are reduced on their device: ``tensorflow`` or ``torch``."""
    adapter = framework_adapter(framework)
    if not isinstance(adapter, DeviceArrayAdapter):
        raise ConfigError(f"arrays of {framework} are reduced through host memory, not on their device.")
    return adapter


def adapter_of(array: Any) -> ArrayAdapter:
    """Returns the adapter of ``array``'s framework; that of NumPy for numbers, lists and all other types.

    >>> type(adapter_of([1.0, 2.0])).__name__
    'NumpyArrays'
    """
    packages = (base.__module__.partition(".")[0] for base in type(array).__mro__)
    return framework_adapter(next((_PACKAGES[each] for each in packages if each in _PACKAGES), "numpy"))


#: A prime.
COLUMNS = 1021
WORD_BYTES = 8


def fingerprint(host: HostArray) -> bytes:
    """Sums that differ if two arrays' bytes differ, ten times as fast as a cryptographic digest.

    A flipped bit changes a sum in any case. Measured on 40 MB: 3 ms, with BLAKE2 61 ms, with CRC-32 14 ms::

        bytes of the array   [ 1021 words of 8 bytes ]      the words are added, as integers, column by column:
                             [ 1021 words            ]      rows of matrices begin in other columns, so rows that are
                             [ …                     ]      exchanged change the sums, too
                             [ the rest ]                   is kept as it is
        fingerprint          [ 1021 sums ][ the rest ]      8 to 16 KiB at most

    >>> array = np.zeros(5000)
    >>> before = fingerprint(array)
    >>> array[7] = -0.0
    >>> len(before), before == fingerprint(array)
    (15496, False)
    """
    raw = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    rows = raw.size // (COLUMNS * WORD_BYTES)
    whole = rows * COLUMNS * WORD_BYTES
    sums = np.add.reduce(raw[:whole].view(np.uint64).reshape(rows, COLUMNS), axis=0) if rows else raw[:0]
    return sums.tobytes() + raw[whole:].tobytes()


#: Those of the last calls; several threads may make some.
_remembered: deque[ChorosError] = deque(maxlen=16)
#: The attribute of an exception of a framework that has the host's.
_HOST_ERROR = "_choros_host_error"


def remember(error: ChorosError) -> None:
    """Keeps an error that what a framework calls on the host is about to raise."""
    _remembered.append(error)


def recognize_errors(theirs: Any, subclass_of: Callable[[Any], Any]) -> None:
    """Lets exceptions of class ``theirs``, but not of its subclasses, also be of the class that the host raised."""

    def create(cls: type[Exception], *args: object, **kwargs: object) -> Exception:
        error = None
        if cls is theirs:
            text = next((arg for arg in args if isinstance(arg, str)), "")
            error = next((each for each in reversed(_remembered) if str(each) and str(each) in text), None)
        created: Exception = Exception.__new__(cls if error is None else subclass_of(type(error)), *args, **kwargs)
        if error is not None:
            vars(created).update({**vars(error), _HOST_ERROR: error})
        return created

    theirs.__new__ = create


def error_of_host(error: BaseException) -> BaseException:
    """Returns the host's exception, whose text is a sentence, if ``error`` is a framework's in its place; else it."""
    original: BaseException = getattr(error, _HOST_ERROR, error)
    return original
