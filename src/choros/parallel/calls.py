"""A call of a collective on any framework's arrays: its arguments, its part on the host and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, final

import numpy as np

from choros.arrays import ArrayAdapter, ArrayFunction, ArraySpec, HostFunction, adapter_of
from choros.comm import BFLOAT16, Array, Communicator, DType, ProcessSet, Reduction, global_process_set
from choros.comm.reduction import wide_dtype
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor, check_compressor
from choros.parallel.compression.compressor import is_floating
from choros.parallel.structure import with_items


class Options(TypedDict, total=False):
    """The arguments by name of a collective: fields of ``CollectiveCall``."""

    name: str | None
    prescale_factor: float
    postscale_factor: float
    compression: Compressor
    process_set: ProcessSet
    horovod_gradients: bool


def options_of(
    name: str | None,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    compression: Compressor,
    horovod_gradients: bool = True,
) -> Options:
    """The arguments of a reduction as a face has them."""
    return Options(
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
        horovod_gradients=horovod_gradients,
    )


@final
@dataclass(frozen=True)
class CollectiveCall:
    """A call of the method ``collective`` of communicators; calls with the same name match on all ranks. It scales
    integers in float64, towards zero as in Horovod, and 16-bit floats in float32.

    >>> import choros
    >>> choros.init()
    >>> CollectiveCall("allreduce", Reduction.SUM, prescale_factor=0.5).reduce([np.array([4, -5])])
    [array([ 2, -2])]
    >>> CollectiveCall("allgather").of_gradient("allreduce").name
    'gradient of allgather'
    """

    collective: str
    op: Reduction = Reduction.AVERAGE
    name: str | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Compressor = Compression.none
    process_set: ProcessSet = global_process_set
    #: Otherwise its gradient is its adjoint.
    horovod_gradients: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Reduction(self.op))
        if not isinstance(self.name, str | None):
            raise ConfigError(f"{self.collective}(name={self.name!r}): expected a str or None.")
        if not isinstance(self.process_set, ProcessSet):
            raise ConfigError(f"{self.collective}(process_set={self.process_set!r}): expected a ProcessSet.")
        for each in ("prescale_factor", "postscale_factor"):
            try:
                float(getattr(self, each))
            except (TypeError, ValueError):
                raise ConfigError(f"{self.collective}({each}={getattr(self, each)!r}): expected a number.") from None
        check_compressor(self.compression)

    @property
    def communicator(self) -> Communicator:
        """That of the participating ranks."""
        return self.process_set.communicator

    @property
    def label(self) -> str:
        """The name, as communicators take it."""
        return self.name or ""

    @property
    def scale(self) -> float:
        """The factor of a sum."""
        return self.prescale_factor * self.postscale_factor

    @property
    def scaled_by(self) -> str:
        """The factors, as ranks compare them."""
        factors = (("prescale_factor", self.prescale_factor), ("postscale_factor", self.postscale_factor))
        return ", ".join(f"{name}={float(factor)}" for name, factor in factors if factor != 1.0)

    @property
    def gradient_factor(self) -> float:
        """The factor of the adjoint of a collective whose gradient in Horovod is another one."""
        if not self.horovod_gradients:
            return 1.0
        size = self.communicator.size
        return float(size) if self.collective.endswith("reducescatter") else 1 / size

    def of_gradient(self, collective: str | None = None) -> CollectiveCall:
        """The call with which its gradient is computed, by another collective or the same."""
        return replace(
            self, collective=collective or self.collective, name=f"gradient of {self.name or self.collective}"
        )

    def run(self, hosts: Sequence[Array], *arguments: Any, **options: str) -> list[Array]:
        """Calls the collective with one array, or with several if it is grouped."""
        collective = partial(getattr(self.communicator, self.collective), name=self.label, **options)
        if not self.collective.startswith("grouped_"):
            return [collective(hosts[0], *arguments)]
        results: list[Array] = collective(list(hosts), *arguments)
        return results

    def reduce(self, hosts: Sequence[Array]) -> list[Array]:
        """Returns the arrays, or this rank's rows of them, reduced by the collective, in the dtype of the compression;
        those that engines reduce with the same operation are sent together.
        """
        communicator = self.communicator
        # What is divided before it is sent is divided anew if a rank is lost.
        return communicator.atomic(partial(self._reduce, hosts)) if communicator.elastic else self._reduce(hosts)

    def _reduce(self, hosts: Sequence[Array]) -> list[Array]:
        plans = [self._plan(host.dtype) for host in hosts]
        results = list(hosts)
        for op in dict.fromkeys(call.op for call, _ in plans):
            indices = [index for index, (call, _) in enumerate(plans) if call.op is op]
            sent = []
            for index in indices:
                call, wire = plans[index]
                sent.append(_scaled(hosts[index], call.prescale_factor).astype(wire, copy=False))
            for index, array in zip(indices, self.run(sent, op, scaled=self.scaled_by), strict=True):
                received = array.astype(hosts[index].dtype, copy=False)
                results[index] = _scaled(received, plans[index][0].postscale_factor)
        return results

    def _plan(self, dtype: DType) -> tuple[CollectiveCall, DType]:
        """What to do with arrays of ``dtype``, and the dtype to send."""
        wire = dtype if dtype == BFLOAT16 else self.compression.wire_dtype(dtype)
        if self.op is Reduction.AVERAGE and (wire != dtype or wire == np.float16):
            # Divided before the cast, as the sum may overflow.
            before = self.prescale_factor / self.communicator.size
            return replace(self, op=Reduction.SUM, prescale_factor=before), wire
        if self.op is Reduction.AVERAGE and dtype.kind in "iu" and self.postscale_factor != 1.0:
            after = self.postscale_factor / self.communicator.size
            return replace(self, op=Reduction.SUM, postscale_factor=after), wire
        return self, wire


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    if array.dtype == np.bool_:
        raise ConfigError("prescale_factor and postscale_factor need numbers, not booleans: cast the array first.")
    integers = array.dtype.kind in "iu"
    work = np.dtype(np.float64) if integers else wide_dtype(array.dtype)
    scaled: Array = (array.astype(work, copy=False) * work.type(factor)).astype(array.dtype, copy=False)
    return scaled


def on_host(
    adapter: ArrayAdapter,
    function: HostFunction,
    arrays: Sequence[Any],
    outputs: Sequence[ArraySpec],
    gradient: ArrayFunction,
) -> list[Any]:
    """Calls ``function`` on the host, also from compiled code; ``gradient`` is its gradient rule."""

    def forward(given: Sequence[Any]) -> Sequence[Any]:
        return adapter.host_call(function, given, outputs)

    if not any(is_floating(output.dtype) for output in outputs):
        return list(forward(arrays))
    return adapter.with_gradient(forward, gradient, arrays)


def on_host_alike(function: Callable[[Array], Array], value: Any, gradient: ArrayFunction) -> Any:
    """``on_host`` with one array and one result of the same shape and dtype."""
    adapter = adapter_of(value)
    (result,) = on_host(adapter, lambda hosts: [function(hosts[0])], [value], [adapter.spec(value)], gradient)
    return result


def of_each_framework(values: Sequence[Any], function: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """The results of ``function``, which is called with all arrays of one framework, in the order of ``values``."""
    arrays = list(map(as_array, values))
    groups: dict[ArrayAdapter, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(adapter_of(array), []).append(index)
    results = arrays
    for indices in groups.values():
        results = with_items(results, indices, function([arrays[index] for index in indices]))
    return results


def of_floating(
    specs: Sequence[ArraySpec], gradients: Sequence[Any], function: Callable[[list[int]], Sequence[Any]]
) -> list[Any]:
    """The gradients that ``function`` computes, given the indices of floating-point arrays; ``None`` for the others."""
    floats = [index for index, spec in enumerate(specs) if is_floating(spec.dtype)]
    return with_items([None] * len(gradients), floats, function(floats))


def as_array(value: Any) -> Any:
    """Converts numbers and lists to arrays, for collectives that always return arrays."""
    return np.asarray(value) if isinstance(value, (bool, int, float, list, tuple)) else value


def times(array: Any, factor: float) -> Any:
    """The product, without an operation for 1."""
    return array if factor == 1.0 else array * factor
