"""JAX arrays, concrete and traced."""

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.arrays.adapter import ArrayAdapter, ArrayFunction, ArraySpec, HostArray, HostFunction
from choros.arrays.jax_host_call import HostCall
from choros.errors import ConfigError


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
        try:
            return ArraySpec(tuple(array.shape), np.dtype(array.dtype))
        except TypeError:
            raise ConfigError(
                f"arrays of {array.dtype} cannot be communicated: of random keys pass jax.random.key_data(key)."
            ) from None

    def is_symbolic(self, arrays: Sequence[Any]) -> bool:
        return any(isinstance(array, jax.core.Tracer) for array in arrays)

    def host_call(
        self,
        function: HostFunction,
        arrays: Sequence[Any],
        outputs: Sequence[ArraySpec],
        *,
        replaced: int = 0,
        keeps: bool = False,
    ) -> list[Any]:
        """An ordered ``io_callback`` if compiled; under ``jax.vmap`` one call, whose last dimension is the batch. In a
        compiled function on a CPU, XLA gives results the memory of arguments that it does not need any more.
        """
        call = HostCall(function, tuple(outputs), replaced=replaced, keeps=keeps)
        if not self.is_symbolic(arrays):
            return call.bind(*arrays)
        constant = jax.custom_vjp(call.bind)  # ``with_gradient`` gives results a gradient that have one
        constant.defvjp(lambda *values: (call.bind(*values), None), _no_gradient)
        return list(constant(*arrays))

    def host_call_if(
        self, due: Any, function: HostFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]
    ) -> list[Any]:
        """``host_call`` if ``due`` is not 0, else zeros; no gradient; unlike ``lax.cond`` it works in ``vmap``."""
        return HostCall(function, tuple(outputs), conditional=True).bind(due, *arrays)

    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        return array.astype(dtype)

    def zeros_like(self, array: Any) -> Any:
        return jnp.zeros_like(array)

    def stop_gradient(self, array: Any) -> Any:
        return jax.lax.stop_gradient(array)

    def with_gradient(self, forward: ArrayFunction, backward: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
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


def _no_gradient(*_: Any) -> Any:
    raise ConfigError(
        "jax.grad needs the gradient of a collective that has none, such as an optimizer's update: call it on "
        "jax.lax.stop_gradient(x)."
    )
