"""TensorFlow tensors, variables and IndexedSlices, eager and in a ``tf.function``.

Errors of calls are also TensorFlow's, so that ``except`` clauses of scripts for Horovod handle them. From a
``tf.function`` or a session TensorFlow passes on the text only, of a ``ValueError`` as an ``InvalidArgumentError``, of
others as an ``UnknownError``: see ``adapter.py``.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record, stop_recording
from tensorflow.python.framework.auto_control_deps import register_acd_resource_resolver
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from choros.arrays.adapter import (
    ArrayFunction,
    ArrayLayout,
    ArraySpec,
    DeviceArrayAdapter,
    HostArray,
    HostFunction,
    recognize_errors,
    remember,
)
from choros.errors import ChorosError, ConfigError, MismatchError

_FLOAT32 = np.dtype(np.float32)
#: DLPack's numbers of the host, and of NVIDIA's GPUs.
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
#: What has no values of its inputs, or those of variables.
_NOT_OF_BATCH = frozenset(("Rank", "ReadVariableOp", "ResourceGather", "Shape", "ShapeN", "Size", "VarHandleOp"))
#: Operations that call functions with side effects.
_OF_FUNCTIONS = frozenset(("Case", "If", "StatefulPartitionedCall", "While"))
#: The functions of the host that graphs call, as TensorFlow knows them.
_tokens: set[bytes] = set()
with tf.Graph().as_default():
    _TURN = tf.constant(0)
#: What to do if the threads of a session do not suffice.
_ADVICE = (
    "A session of TensorFlow 1 begins what one run() fetches in any order, and each collective waits in one of its "
    "threads. If they are fewer than collectives, ranks may begin with different ones: order these by "
    "tf.control_dependencies, or give the session a thread for each, by config=tf.compat.v1.ConfigProto("
    "use_per_session_threads=True, inter_op_parallelism_threads=…)."
)


@final
class TensorflowArrays(DeviceArrayAdapter):
    """Tensors and sparse gradients (``IndexedSlices``); the methods that take tensors make the latter dense."""

    def to_host(self, array: Any) -> HostArray:
        """Returns a copy, because some of TensorFlow's views are writable."""
        return np.asarray(tf.convert_to_tensor(array).numpy())

    def from_host(self, host: HostArray, like: Any) -> Any:
        del like
        return tf.convert_to_tensor(host)

    def spec(self, array: Any) -> ArraySpec:
        if isinstance(array, tf.RaggedTensor | tf.SparseTensor):
            raise ConfigError(
                f"a {type(array).__name__} cannot be communicated: give its parts (values and row_splits, or indices) "
                "to collectives, or a dense tensor."
            )
        if array.shape.rank is None:
            raise ConfigError(
                "the number of dimensions of this tensor is not known while the tf.function is traced: set it with "
                "tensor.set_shape([None, …])."
            )
        return ArraySpec(tuple(array.shape.as_list()), np.dtype(array.dtype.as_numpy_dtype))

    def rows_of(self, array: Any) -> tuple[Any, Any, Any] | None:
        """Of ``tf.IndexedSlices``, whose dense shape may be ``None``."""
        return (array.indices, array.values, array.dense_shape) if isinstance(array, tf.IndexedSlices) else None

    def is_of_batch(self, array: Any) -> bool | None:
        """In graphs; an array's lengths, and the variables, are not of the batch."""
        if not tf.is_symbolic_tensor(array):
            return None
        pending, seen = [array], set()
        while pending:
            tensor = pending.pop()
            operation = tensor.op
            if operation.name in seen:
                continue
            seen.add(operation.name)
            if operation.type == "Placeholder":  # an argument, or from outside of this function
                outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
                if id(tensor) not in outside:
                    return True
                pending += filter(tf.is_symbolic_tensor, (outside[id(tensor)],))
            elif operation.type not in _NOT_OF_BATCH:
                if operation.op_def.is_stateful or "Random" in operation.type:
                    return True
                pending += operation.inputs
        return False

    def from_rows(self, indices: Any, values: Any, shape: Any) -> Any:
        if isinstance(shape, tuple):
            shape = tf.constant(shape, tf.int32 if max(shape) <= tf.int32.max else tf.int64)
        return tf.IndexedSlices(values, indices, shape)

    def to_dense(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Sums the rows of ``tf.IndexedSlices``."""
        rows = self.rows_of(array)
        return array if rows is None else tf.math.unsorted_segment_sum(rows[1], rows[0], shape[0])

    def is_symbolic(self, arrays: Sequence[Any]) -> bool:
        del arrays
        return not tf.executing_eagerly()

    def host_call(
        self, function: HostFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec], **replacing: Any
    ) -> list[Any]:
        """In a ``tf.function``, uses a ``tf.numpy_function``, which XLA cannot compile."""
        del replacing
        if not self.is_symbolic(arrays):
            with tensorflow_errors():
                return super().host_call(function, arrays, outputs)
        _refuse_xla()
        dense = [tf.convert_to_tensor(array) for array in arrays]
        in_session = not tf.compat.v1.get_default_graph().building_function
        called = _session_errors()(function) if in_session else function

        def on_host(*hosts: HostArray) -> list[HostArray]:
            try:
                return list(called(hosts))
            except ChorosError as error:
                remember(error)
                raise

        return _in_order(tf.numpy_function(on_host, dense, [tf.as_dtype(each.dtype) for each in outputs]), outputs)

    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        return tf.cast(array, dtype)

    def sum(self, array: Any) -> Any:
        return tf.reduce_sum(array)

    def stop_gradient(self, array: Any) -> Any:
        return tf.stop_gradient(array)

    def extent(self, array: Any, axis: int) -> Any:
        return tf.shape(array)[axis]

    def device_call(self, function: ArrayFunction, arrays: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
        """Uses a ``tf.py_function``, whose tensors stay on their device; in there operations are eager."""

        def eagerly(*tensors: Any) -> list[Any]:
            with stop_recording():  # a tape of tf.py_function's would keep every tensor until the next step
                return [tf.convert_to_tensor(each) for each in function(tensors)]

        dense = [tf.convert_to_tensor(array) for array in arrays]
        if tf.executing_eagerly():
            with tensorflow_errors():
                return eagerly(*dense)
        _refuse_xla()
        gpus = tf.config.list_logical_devices("GPU")
        with tf.device(gpus[0].name if gpus else None):
            results = tf.py_function(eagerly, dense, [tf.as_dtype(output.dtype) for output in outputs])
        return _in_order(results, outputs)

    def zeros_like(self, array: Any) -> Any:
        return tf.zeros_like(array)

    def pack(
        self,
        arrays: Sequence[Any] | None,
        sizes: Sequence[int],
        dtype: np.dtype[np.generic],
        factor: float,
        device: Any,
    ) -> Any:
        """Ends with an operation that shares no memory: a product, and maybe a cast; ``tf.concat`` of one may."""
        del device
        if arrays is None:
            return tf.fill([sum(sizes)], tf.zeros([], dtype))
        work = tf.as_dtype(max([dtype, _FLOAT32, *(array.dtype.as_numpy_dtype for array in arrays)], key=_itemsize))
        return tf.cast(tf.concat([tf.cast(tf.reshape(array, [-1]), work) for array in arrays], 0) * factor, dtype)

    def unpack(self, vector: Any, layout: Sequence[ArrayLayout], factor: float) -> list[Any]:
        """Parts of one dtype are scaled together."""
        if factor != 1.0:
            work = tf.as_dtype(max([*(dtype for _, dtype in layout), _FLOAT32], key=_itemsize))
            vector = tf.cast(vector, work) * factor
        parts = tf.split(vector, [math.prod(shape) for shape, _ in layout])
        return [tf.cast(tf.reshape(part, shape), dtype) for part, (shape, dtype) in zip(parts, layout, strict=True)]

    def buffer(self, vector: Any, device: Any) -> Any:
        return _Buffer(vector, device.index)

    def with_gradient(self, forward: ArrayFunction, backward: ArrayFunction, arrays: Sequence[Any]) -> list[Any]:
        if tf.executing_eagerly() and not could_possibly_record():
            return list(forward(arrays))

        @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
        def differentiable(*tensors: Any) -> Any:
            results = list(forward(tensors))

            def gradient(*upstream: Any) -> list[Any]:
                pairs = zip(upstream, results, strict=True)
                return list(backward([given if result.dtype.is_floating else result for given, result in pairs]))

            return results, gradient

        return list(differentiable(*[tf.convert_to_tensor(array) for array in arrays]))


ADAPTER = TensorflowArrays()


def _in_order(results: Sequence[Any], outputs: Sequence[ArraySpec]) -> list[Any]:
    """Returns the results of a call of the host, which runs in the order of the program."""
    _tokens.add(results[0].op.get_attr("token"))
    for result, output in zip(results, outputs, strict=True):
        result.set_shape(output.shape)
    return list(results)


def _choros_calls(operation: Any, _: Any, writes: Any) -> bool:
    """Makes each call write to a resource of their own. By itself TensorFlow orders what has no resource, but not
    against branches, loops and functions with variables in which there are calls.
    """
    if _TURN in writes or not _calls_host(operation):
        return False
    writes.add(_TURN)
    return True


def _calls_host(operation: Any) -> bool:
    if operation.type in ("EagerPyFunc", "PyFunc"):
        return operation.get_attr("token") in _tokens
    if operation.type not in _OF_FUNCTIONS:
        return False
    attributes = operation.node_def.attr.values()
    names = {each.name for value in attributes for each in (value.func, *value.list.func)} - {""}
    graphs = (getattr(operation.graph._get_function(name), "graph", None) for name in names)
    return any(_calls_host(each) for graph in graphs if graph is not None for each in graph.get_operations())


def _refuse_xla() -> None:
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "choros communicates through the host, which is not possible in functions compiled by XLA: pass "
            "jit_compile=False to model.compile() or tf.function(). (choros' callbacks do so in model.fit.)"
        )


def _itemsize(dtype: Any) -> int:
    return int(np.dtype(dtype).itemsize)


@final
class _Buffer:
    """The memory of a tensor that nothing else refers to, under DLPack's protocol as others understand it.
    TensorFlow's own refuses the consumer's stream, but waits until the device has computed the tensor, so any stream
    may use it; and it numbers the GPUs that TensorFlow sees, others those of the process.
    """

    def __init__(self, tensor: Any, index: int) -> None:
        self._tensor = tensor
        self._index = index

    def __dlpack__(self, **consumer: Any) -> Any:
        del consumer
        return tf.experimental.dlpack.to_dlpack(self._tensor)  # tensors of TensorFlow 2.18 have no __dlpack__

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DLPACK_CUDA, self._index) if "GPU" in self._tensor.backing_device else (_DLPACK_CPU, 0)


@functools.cache
def _also(theirs: Any, own: Any) -> Any:
    """Returns a subclass of both, named as ``own``, with ``theirs``' arguments; mismatches are Horovod's error, too."""
    bases = (tf.errors.FailedPreconditionError, theirs) if own is MismatchError else (theirs,)
    code = bases[0](None, None, "").error_code

    def initialize(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, code, *args)

    def reduce(self: Any) -> Any:
        return own, (self.message,)

    namespace = {"__init__": initialize, "__reduce__": reduce, "__module__": own.__module__, "__doc__": own.__doc__}
    return type(own.__name__, (own, *bases), namespace)


@contextmanager
def tensorflow_errors() -> Iterator[None]:
    """A context for eager calls, whose errors that Horovod raises as TensorFlow's are these, too."""
    try:
        yield
    except (MismatchError, ConfigError) as error:
        own: Any = type(error)
        if own not in (MismatchError, ConfigError):
            raise
        combined = _also(tf.errors.InvalidArgumentError, own)
        raise combined(None, None, str(error)).with_traceback(error.__traceback__) from None


@contextmanager
def _session_errors() -> Iterator[None]:
    """A context for calls of a session of TensorFlow 1: errors of ranks that ask for different names have a remedy."""
    try:
        yield
    except MismatchError as error:
        if len(set(re.findall(r"\(name='([^']*)'", str(error)))) < 2:
            raise
        raise MismatchError(f"{error}\n{_ADVICE}") from None


register_acd_resource_resolver(_choros_calls)
for _class in (tf.errors.InvalidArgumentError, tf.errors.UnknownError):
    recognize_errors(_class, functools.partial(_also, _class))
