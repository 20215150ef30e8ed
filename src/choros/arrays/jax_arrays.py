"""JAX arrays, concrete and traced. Calls of host functions are a primitive of JAX's, because ``io_callback`` has no
rule for ``jax.vmap``.

The call for a batch is one call, of arrays whose last dimension is that of the batch. ``io_callback`` copies; on a
CPU ``buffer_callback`` passes large arrays in XLA's memory, unordered: two ordered calls enclose it::

    ordered, as the program calls:   begin ─────────────► end    begin ─────────────► end
                                       │                   ▲       │                   ▲
                                       └► buffer_callback ─┘       └► buffer_callback ─┘
    arrays                                gradients ► results
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from choros.arrays.adapter import (
    ArrayAdapter,
    ArrayFunction,
    ArraySpec,
    HostArray,
    HostFunction,
    recognize_errors,
    remember,
)
from choros.errors import ChorosError, ConfigError, MismatchError

_primitive = Primitive("choros_host_call")
_primitive.multiple_results = True
#: Copies of fewer bytes cost less than the two callbacks that enclose a ``buffer_callback``.
_LARGE_BYTES = 1 << 20
#: The least threads of XLA: one for a callback, one for its arguments.
_THREADS = 2
_NUMBER = jax.ShapeDtypeStruct((), np.int32)


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


ADAPTER = JaxArrays()


def _no_gradient(*_: Any) -> Any:
    raise ConfigError(
        "jax.grad needs the gradient of a collective that has none, such as an optimizer's update: call it on "
        "jax.lax.stop_gradient(x)."
    )


@final
@dataclass(frozen=True)
class HostCall:
    """A call of a host function; with ``conditional``, its first argument says if it is called: 0 gives zeros. It may
    write its first ``replaced`` results into arrays that it is given, and return them, or ``None``. These results
    replace as many last arguments, unless those keep (``keeps``) their values.
    """

    function: HostFunction
    outputs: tuple[ArraySpec, ...]
    conditional: bool = False
    replaced: int = 0
    keeps: bool = False

    def bind(self, *arrays: Any) -> list[Any]:
        """Calls it now, or in each run of the function that is being compiled, in the order of the program."""
        return list(_primitive.bind(*arrays, call=self))

    def now(self, *arrays: Any) -> list[Any]:
        """The results for concrete arrays."""
        if self.conditional:
            due, *arrays = arrays  # type: ignore[assignment]
            if not due:
                return self._zeros()
        jax.effects_barrier()  # on a GPU, a compiled function that was called earlier may still have calls to make
        return [jnp.asarray(result) for result in self._on_host(arrays)]

    def compiled(self, *arrays: Any, on_cpu: bool = False) -> list[Any]:
        """The results in a compiled function."""
        large = sum(array.size * array.dtype.itemsize for array in arrays) >= _LARGE_BYTES
        callback = self._callback_in_memory if on_cpu and large else self._callback
        if not self.conditional:
            return callback(*arrays)
        due, *given = arrays
        return list(jax.lax.cond(due > 0, callback, lambda *_: self._zeros(), *given))

    def of_batch(self, size: int) -> HostCall:
        """The call for a batch of ``size``."""
        outputs = (replace(each, shape=(*each.shape, size)) if each.batched else each for each in self.outputs)
        return replace(self, outputs=tuple(outputs))

    def abstract(self) -> list[Any]:
        """The results' shapes and dtypes, for JAX."""
        for output in self.outputs:
            if None in output.shape:
                raise ConfigError(
                    "the shape of this collective's result is known only when it runs, and jax.jit requires it "
                    "at compile time: call the collective outside of jit."
                )
        return [jax.core.ShapedArray(output.shape, output.dtype) for output in self.outputs]

    def _on_host(self, arrays: Sequence[Any], out: Sequence[HostArray] | None = None) -> list[HostArray]:
        hosts = [np.asarray(array) for array in arrays]
        return [np.asarray(each) for each in (self.function(hosts, out) if self.replaced else self.function(hosts))]

    def _as_compiled(self, arrays: Sequence[Any], out: Sequence[HostArray] | None = None) -> list[HostArray]:
        """The results, in the shapes that the function was compiled for."""
        try:
            results = self._on_host(arrays, out)
            for result, expected in zip(results, self.outputs, strict=True):
                if result.shape != expected.shape:
                    raise MismatchError(
                        f"a collective in a compiled function returned an array of shape {result.shape}, and was "
                        f"compiled for {expected.shape}: there each rank gives as many rows, and none has joined. "
                        "Call it outside of jax.jit."
                    )
        except ChorosError as error:
            remember(error)
            raise
        return results

    def _callback(self, *arrays: Any) -> list[Any]:
        def on_host(*hosts: Any) -> list[HostArray]:
            return self._as_compiled(hosts)

        return list(io_callback(on_host, self._shapes, *arrays, ordered=True))

    def _callback_in_memory(self, *arrays: Any) -> list[Any]:
        overwritten = 0 if self.keeps else self.replaced

        def on_host(_: Any, out: Sequence[Any], __: Any, *given: Any) -> None:
            targets, hosts = ([np.asarray(buffer) for buffer in buffers] for buffers in (out, given))
            for host in hosts[: len(hosts) - overwritten]:
                host.flags.writeable = False
            results = [*self._as_compiled(hosts, targets[: self.replaced]), np.zeros((), np.int32)]
            for target, result in zip(targets, results, strict=True):
                if not np.may_share_memory(target, result):
                    np.copyto(target, result)

        first = 1 + len(arrays) - overwritten  # after ``begun``
        same_memory = {first + index: index for index in range(overwritten)}
        shapes = [*self._shapes, _NUMBER]
        call = buffer_callback(on_host, shapes, has_side_effect=True, input_output_aliases=same_memory)
        begun = io_callback(lambda: np.int32(0), _NUMBER, ordered=True)
        results: list[Any] = call(begun, *arrays)
        done = results.pop()
        io_callback(lambda _: None, None, done, ordered=True)
        return results

    @property
    def _shapes(self) -> list[Any]:
        return [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in self.outputs]

    def _zeros(self) -> list[Any]:
        return [jnp.zeros(output.shape, output.dtype) for output in self.outputs]


def _bind_batch(arrays: Sequence[Any], dims: Sequence[int | None], *, call: HostCall) -> tuple[list[Any], list[Any]]:
    """The rule for ``jax.vmap``; ``dims`` are the arrays' dimensions of the batch."""
    (size,) = {array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None}
    stacked = [
        jnp.broadcast_to(array[..., None], (*array.shape, size)) if dim is None else jnp.moveaxis(array, dim, -1)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    if call.conditional:
        stacked[0] = stacked[0].max()  # one condition for the whole batch
    results = call.of_batch(size).bind(*stacked)
    return results, [len(each.shape) if each.batched else None for each in call.outputs]


def _lowered(*arrays: Any, call: HostCall, on_cpu: bool = False) -> list[Any]:
    return call.compiled(*arrays, on_cpu=on_cpu)


@functools.cache
def _order() -> Any:
    """The effect of an ordered ``io_callback``."""
    return jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


def spare_xla_thread() -> None:
    """Prevents a deadlock of compiled JAX functions that wait for other ranks in a callback (jax-ml/jax#25861). The
    callback holds a thread of XLA's pool, and another copies its arguments: with one core, and so one thread, a step
    on large arrays would wait for itself. Must be called before JAX computes anything.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("NPROC", "")
    if (int(threads) if threads.isdigit() else cores) < _THREADS:
        os.environ["NPROC"] = str(_THREADS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@functools.cache
def _also(own: Any) -> Any:
    """Returns a subclass of ``own`` and of JAX's error, with the name of ``own`` and the arguments of JAX's."""
    namespace = {"__init__": JaxRuntimeError.__init__, "__module__": own.__module__, "__doc__": own.__doc__}
    return type(own.__name__, (own, JaxRuntimeError), namespace)


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    """Not choros' own errors, which reach the caller: a traceback of one that a job survives looks like its end."""
    return not (record.exc_info and isinstance(record.exc_info[1], ChorosError))


recognize_errors(JaxRuntimeError, _also)
logging.getLogger("jax._src.callback").addFilter(_is_to_be_logged)
_primitive.def_impl(lambda *arrays, call: call.now(*arrays))
_primitive.def_effectful_abstract_eval(lambda *_, call: (call.abstract(), _order()))
mlir.register_lowering(_primitive, mlir.lower_fun(_lowered, multiple_results=True))
mlir.register_lowering(
    _primitive, mlir.lower_fun(functools.partial(_lowered, on_cpu=True), multiple_results=True), platform="cpu"
)
batching.primitive_batchers[_primitive] = _bind_batch
