"""JAX arrays, concrete and traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from choros.arrays.adapter import ArrayAdapter, ArrayFunction, ArraySpec, HostArray, HostFunction
from choros.errors import ConfigError

__all__ = ["JaxArrays"]


@final
class JaxArrays(ArrayAdapter):
    """``jax.Array`` and its tracers inside ``jax.jit``."""

    static_shapes = True
    widest_float = np.dtype(np.float32)  # float64 only with jax_enable_x64

    def to_host(self, array: Any) -> HostArray:
        """Returns a read-only view of an array on the CPU."""
        return np.asarray(array)

    def from_host(self, host: HostArray, like: Any) -> Any:
        """The result may share memory with ``host``."""
        del like
        return jnp.asarray(host)

    def spec(self, array: Any) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(tuple(array.shape), np.dtype(array.dtype))

    def is_symbolic(self, arrays: Sequence[Any]) -> bool:
        """Returns whether this is inside a JAX transformation."""
        return any(isinstance(array, jax.core.Tracer) for array in arrays)

    def host_call(self, function: HostFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
        """Inside a transformation, an ordered ``io_callback``: XLA keeps the calls in the order of the program."""
        if not self.is_symbolic(arrays):
            return super().host_call(function, arrays, outputs)
        for output in outputs:
            if None in output.shape:
                raise ConfigError(
                    "the shape of this collective's result is known only when it runs, and jax.jit requires it "
                    "at compile time: call the collective outside of jit."
                )
        shapes = [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs]

        def on_host(*hosts: Any) -> list[HostArray]:
            return [np.asarray(result) for result in function([np.asarray(host) for host in hosts])]

        return list(io_callback(on_host, shapes, *arrays, ordered=True))

    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        """``jax.Array.astype``."""
        return array.astype(dtype)

    def sum(self, array: Any) -> Any:
        """``jax.numpy.sum``."""
        return jnp.sum(array)

    def zeros_like(self, array: Any) -> Any:
        """``jax.numpy.zeros_like``."""
        return jnp.zeros_like(array)

    def stop_gradient(self, array: Any) -> Any:
        """``jax.lax.stop_gradient``."""
        return jax.lax.stop_gradient(array)

    def extent(self, array: Any, axis: int) -> Any:
        """Returns a constant: shapes are static inside ``jax.jit``."""
        return jnp.asarray(array.shape[axis])

    def with_gradient(self, forward: ArrayFunction, backward: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
        """Uses ``jax.custom_vjp``, inside a JAX transformation."""
        if not self.is_symbolic(arrays):
            return list(forward(arrays))

        @jax.custom_vjp  # type: ignore[untyped-decorator, unused-ignore]
        def differentiable(*values: Any) -> list[Any]:
            return list(forward(values))

        def run(*values: Any) -> tuple[list[Any], list[Any]]:
            results = differentiable(*values)  # not forward: this call may be differentiated, too
            return results, [None if jnp.issubdtype(result.dtype, jnp.floating) else result for result in results]

        def gradient(integers: list[Any], upstream: list[Any]) -> tuple[Any, ...]:
            pairs = zip(upstream, integers, strict=True)
            return tuple(backward([given if integer is None else integer for given, integer in pairs]))

        differentiable.defvjp(run, gradient)
        return list(differentiable(*arrays))
