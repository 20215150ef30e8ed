"""Calls of host functions as a primitive of JAX.

``io_callback`` is what runs in compiled functions, but it has no rule for ``jax.vmap``. The primitive has one: the call
for a batch is one call, of arrays whose last dimension is that of the batch. Functions that do the same with all
elements of an array, or of a row, then do for a batch what they do for each of its elements.

``io_callback`` copies arguments and results. On a CPU large arrays are passed as they are, in XLA's memory, by
``buffer_callback``. That keeps no order, so two ordered callbacks without arrays enclose it::

    ordered, as the program calls:   begin ─────────────► end    begin ─────────────► end
                                       │                   ▲       │                   ▲
                                       └► buffer_callback ─┘       └► buffer_callback ─┘
    arrays                                gradients ► results
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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

from choros.arrays.adapter import ArraySpec, HostArray, HostUpdate
from choros.arrays.host_errors import recognize_errors, remembered_errors
from choros.errors import ConfigError

__all__ = ["HostCall"]

_primitive = Primitive("choros_host_call")
_primitive.multiple_results = True
#: Copies of fewer bytes cost less than the two callbacks that enclose a ``buffer_callback``.
_LARGE_BYTES = 1 << 20
_NUMBER = jax.ShapeDtypeStruct((), np.int32)


@final
@dataclass(frozen=True)
class HostCall:
    """A call of a function on the host.

    Attributes:
        function: from host arrays to host arrays; it is given arrays into which it may write its first ``replaced``
            results, and return them, or ``None``.
        outputs: the shapes and dtypes of its results.
        conditional: whether the first argument is a number that says if the function is called with the others; where
            it is 0, the results are zeros.
        replaced: the number of last arguments that as many first results replace.
        keeps: whether these arguments keep their values: the results have other memory.
    """

    function: HostUpdate
    outputs: tuple[ArraySpec, ...]
    conditional: bool = False
    replaced: int = 0
    keeps: bool = False

    def bind(self, *arrays: Any) -> list[Any]:
        """Calls it now, or in each run of the function that is being compiled, in the order of the program.

        Raises:
            ConfigError: a function is being compiled, and the shape of a result is not known.
        """
        return list(_primitive.bind(*arrays, call=self))

    def now(self, *arrays: Any) -> list[Any]:
        """The results for concrete arrays."""
        if self.conditional:
            due, *arrays = arrays  # type: ignore[assignment]
            if not due:
                return self._zeros()
        jax.effects_barrier()  # on a GPU, a compiled function that was called earlier may still have calls to make
        return [jnp.asarray(result) for result in self.function([np.asarray(array) for array in arrays], None)]

    def compiled(self, *arrays: Any) -> list[Any]:
        """The results in a compiled function."""
        return self._results(self._callback, arrays)

    def compiled_for_cpu(self, *arrays: Any) -> list[Any]:
        """The results in a compiled function on a CPU."""
        nbytes = sum(array.size * array.dtype.itemsize for array in arrays)
        return self._results(self._callback if nbytes < _LARGE_BYTES else self._callback_in_memory, arrays)

    def _results(self, callback: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
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

    def _callback(self, *arrays: Any) -> list[Any]:
        @remembered_errors()
        def on_host(*hosts: Any) -> list[HostArray]:
            return [np.asarray(result) for result in self.function([np.asarray(host) for host in hosts], None)]

        return list(io_callback(on_host, self._shapes, *arrays, ordered=True))

    def _callback_in_memory(self, *arrays: Any) -> list[Any]:
        overwritten = 0 if self.keeps else self.replaced

        @remembered_errors()
        def on_host(_: Any, out: Sequence[Any], __: Any, *given: Any) -> None:
            targets, hosts = ([np.asarray(buffer) for buffer in buffers] for buffers in (out, given))
            for host in hosts[: len(hosts) - overwritten]:
                host.flags.writeable = False
            results = [*map(np.asarray, self.function(hosts, targets[: self.replaced])), np.zeros((), np.int32)]
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


@functools.cache
def _order() -> Any:
    """The effect of an ordered ``io_callback``."""
    return jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


@functools.cache
def _also(own: Any) -> Any:
    """Returns a subclass of ``own`` and of JAX's error, with the name of ``own`` and the arguments of JAX's."""
    namespace = {"__init__": JaxRuntimeError.__init__, "__module__": own.__module__, "__doc__": own.__doc__}
    return type(own.__name__, (own, JaxRuntimeError), namespace)


recognize_errors(JaxRuntimeError, _also)
_primitive.def_impl(lambda *arrays, call: call.now(*arrays))
_primitive.def_effectful_abstract_eval(lambda *_, call: (call.abstract(), _order()))
mlir.register_lowering(_primitive, mlir.lower_fun(lambda *arrays, call: call.compiled(*arrays), multiple_results=True))
mlir.register_lowering(
    _primitive,
    mlir.lower_fun(lambda *arrays, call: call.compiled_for_cpu(*arrays), multiple_results=True),
    platform="cpu",
)
batching.primitive_batchers[_primitive] = _bind_batch
