"""Reductions of host arrays with Horovod's factors, in another dtype if they are compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.comm import BFLOAT16, Communicator, Reduction
from choros.comm.reduction import working_dtype
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor, check_compressor

__all__ = ["Scaling"]

Array = NDArray[Any]


@final
@dataclass(frozen=True)
class Scaling:
    """What a reduction does with a rank's values before it sends them, and with the result.

    Products with integers are computed in float64 and rounded towards zero, as in Horovod; those with 16-bit floats in
    float32. An average with a ``postscale`` is rounded once.

    Attributes:
        op: the reduction.
        prescale: the factor before it.
        postscale: the factor after it.
        compression: the dtype in which values are sent.

    Example:
        >>> from choros.comm.engines.local import LocalCommunicator
        >>> halved = Scaling(Reduction.SUM, prescale=0.5)
        >>> halved.allreduce(LocalCommunicator(), "allreduce", [np.array([4, -5])], name="")
        [array([ 2, -2])]
    """

    op: Reduction
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = Compression.none

    def __post_init__(self) -> None:
        check_compressor(self.compression)

    @property
    def factor(self) -> float:
        """The factor of both."""
        return self.prescale * self.postscale

    def allreduce(
        self, communicator: Communicator, collective: str, hosts: Sequence[Array], *, name: str
    ) -> list[Array]:
        """Returns the reduced arrays; those that engines reduce with the same operation are sent together.

        Args:
            communicator: the ranks.
            collective: ``"allreduce"`` of one array, or ``"grouped_allreduce"``.
            hosts: arrays, which are not written to.
            name: shown in errors.
        """

        def reduce(sent: list[Array], op: Reduction) -> list[Array]:
            if collective == "allreduce":
                return [communicator.allreduce(sent[0], op, name=name)]
            return communicator.grouped_allreduce(sent, op, name=name)

        return self._reduce(reduce, hosts, communicator.size)

    def reducescatter(
        self, communicator: Communicator, collective: str, hosts: Sequence[Array], *, name: str
    ) -> list[Array]:
        """Returns this rank's rows of the reduced arrays; the arguments are as for ``allreduce``."""

        def reduce(sent: list[Array], op: Reduction) -> list[Array]:
            if collective == "reducescatter":
                return [communicator.reducescatter(sent[0], op, name=name)]
            return communicator.grouped_reducescatter(sent, op, name=name)

        return self._reduce(reduce, hosts, communicator.size)

    def _reduce(
        self, reduce: Callable[[list[Array], Reduction], list[Array]], hosts: Sequence[Array], size: int
    ) -> list[Array]:
        plans = [self._plan(host.dtype, size) for host in hosts]
        results = list(hosts)
        for op in dict.fromkeys(plan.op for plan, _ in plans):
            indices = [index for index, (plan, _) in enumerate(plans) if plan.op is op]
            reduced = reduce([plans[index][0]._sent(hosts[index], plans[index][1]) for index in indices], op)
            for index, array in zip(indices, reduced, strict=True):
                results[index] = plans[index][0]._received(array, hosts[index].dtype)
        return results

    def _plan(self, dtype: np.dtype[Any], size: int) -> tuple[Scaling, np.dtype[Any]]:
        """What to do with arrays of ``dtype``, and the dtype to send."""
        wire = dtype if dtype == BFLOAT16 else self.compression.wire_dtype(dtype)
        if self.op is Reduction.AVERAGE and wire != dtype:
            # Divided before the cast: the sum may overflow the narrower dtype.
            return replace(self, op=Reduction.SUM, prescale=self.prescale / size), wire
        if self.op is Reduction.AVERAGE and dtype.kind in "iu" and self.postscale != 1.0:
            return replace(self, op=Reduction.SUM, postscale=self.postscale / size), wire
        return self, wire

    def _sent(self, host: Array, wire: np.dtype[Any]) -> Array:
        return _scaled(host, self.prescale).astype(wire, copy=False)

    def _received(self, array: Array, dtype: np.dtype[Any]) -> Array:
        return _scaled(array.astype(dtype, copy=False), self.postscale)


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    if array.dtype == np.bool_:
        raise ConfigError("prescale_factor and postscale_factor need numbers, not booleans: cast the array first.")
    integers = array.dtype.kind in "iu"
    work = np.dtype(np.float64) if integers else np.promote_types(working_dtype(array.dtype), np.float32)
    scaled: Array = (array.astype(work, copy=False) * work.type(factor)).astype(array.dtype, copy=False)
    return scaled
