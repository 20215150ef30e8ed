"""Gradients of Keras' framework on their way to the host, where ranks reduce them, and back."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from choros.arrays import ArrayAdapter, ArraySpec, device_adapter, framework_adapter
from choros.comm import Array, DType
from choros.parallel.reduce.gradients import Gradient, GradientKind, GradientLayout, SparseRows

#: A number that the host returns to the training step.
_FLAG = ArraySpec((), np.dtype(np.int32))


def tensor_of(gradient: Gradient) -> Any:
    """Returns a reduced gradient as a tensor of Keras' framework; ``SparseRows`` as its sparse gradient."""
    if isinstance(gradient, np.ndarray):
        return keras.ops.convert_to_tensor(gradient)
    if not isinstance(gradient, SparseRows):
        return gradient
    indices, values = map(keras.ops.convert_to_tensor, (gradient.indices, gradient.values))
    return keras_arrays().from_rows(indices, values, gradient.shape)


def host_call(
    function: Callable[[Sequence[Array], list[Gradient], Sequence[Array] | None], Sequence[Gradient]],
    numbers: Sequence[Any],
    gradients: Sequence[Any],
    layout: GradientLayout,
    device: Any,
    flag: Callable[[], int],
    returned: GradientLayout | None = None,
    *,
    keeps: bool,
) -> tuple[list[Any], Any]:
    """Calls ``function(numbers, gradients, out)`` on the host, from any step; returns gradients, and ``flag()`` then.
    A sparse one is two arrays of varying rows, indices and values; on a ``device`` dense ones stay. ``out``: arrays
    for results, those of ``gradients`` unless it ``keeps`` these until it returns, or ``None``.
    """
    adapter, returned = keras_arrays(), layout if returned is None else returned
    inputs = [each if keras.ops.is_tensor(each) else keras.ops.convert_to_tensor(each, "int32") for each in numbers]
    of_batch = []
    for gradient in gradients:
        rows = adapter.rows_of(gradient)
        inputs += (gradient,) if rows is None else rows[:2]
        of_batch.append(rows is None or adapter.is_of_batch(rows[0]))

    def on_host(hosts: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        results: list[Array] = []
        own = [
            dataclasses.replace(each, of_batch=of_its_batch) if isinstance(each, SparseRows) else each
            for each, of_its_batch in zip(_joined(hosts[len(numbers) :], layout, _rows_on_host), of_batch, strict=True)
        ]
        for result in function(hosts[: len(numbers)], own, out):
            results += (result.indices, result.values) if isinstance(result, SparseRows) else (result,)
        return [*results, np.asarray(flag(), np.int32)]

    outputs: list[ArraySpec] = []
    for each in returned:
        if each.sparse:
            outputs += ArraySpec((None,), each.index_dtype), ArraySpec((None, *each.shape[1:]), each.dtype)
        else:
            outputs.append(ArraySpec(*each[:2]))
    outputs.append(_FLAG)
    if device is not None:
        *results, flagged = device_adapter(device.framework).device_call(on_host, inputs, outputs)
    elif any(each.sparse for each in (*layout, *returned)):
        *results, flagged = adapter.host_call(on_host, inputs, outputs)
    else:
        keeps = keeps or returned != layout
        *results, flagged = adapter.host_call(on_host, inputs, outputs, replaced=len(returned), keeps=keeps)
    return _joined(results, returned, adapter.from_rows), flagged


def tell_host(function: Callable[[Sequence[Array]], None], arrays: Sequence[Any]) -> Any:
    """Calls ``function`` on the host, from any step, for what it does; returns a number that is computed by that."""

    def on_host(hosts: Sequence[Array]) -> list[Array]:
        function(hosts)
        return [np.asarray(0, np.int32)]

    (number,) = keras_arrays().host_call(on_host, arrays, [_FLAG])
    return number


def _rows_on_host(indices: Any, values: Any, shape: tuple[int, ...]) -> SparseRows:
    if not isinstance(values, np.ndarray):
        indices, values = map(keras_arrays().to_host, (indices, values))
    return SparseRows(indices, values, shape)


def _joined(arrays: Sequence[Any], layout: GradientLayout, from_rows: Callable[..., Any]) -> list[Any]:
    if len(arrays) == len(layout):  # all are dense
        return list(arrays)
    parts = iter(arrays)
    return [from_rows(next(parts), next(parts), each.shape) if each.sparse else next(parts) for each in layout]


def layout_entry(gradient: Any, variable: Any) -> GradientKind:
    """The entry of a gradient in the layout: its static shape may be unknown, that of the variable is not."""
    rows = keras_arrays().rows_of(gradient)
    shape = tuple(map(int, variable.shape))  # of Dimensions, after tf.compat.v1.disable_v2_behavior()
    if rows is None:
        return GradientKind(shape, dtype_of(gradient))
    return GradientKind(shape, dtype_of(rows[1]), index_dtype=dtype_of(rows[0]), repeats=is_embedding(variable))


def is_embedding(variable: Any) -> bool:
    """Whether ``variable`` is the table of a ``keras.layers.Embedding``, which gives it this name."""
    return bool(getattr(variable, "name", None) == "embeddings")


def is_overwritten(variable: Any) -> bool:
    """Whether Keras replaces ``variable`` by its gradient: the scales and largest values of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def scaled(gradient: Any, factor: Any, variable: Any) -> Any:
    """The gradient of ``variable`` times a factor, a number or a tensor of any dtype."""
    adapter = keras_arrays()
    if not isinstance(factor, float):
        factor = keras.ops.cast(factor, gradient.dtype)
    rows = adapter.rows_of(gradient)
    return gradient * factor if rows is None else adapter.from_rows(rows[0], rows[1] * factor, tuple(variable.shape))


def keras_arrays() -> ArrayAdapter:
    """The adapter of the framework that Keras uses."""
    return framework_adapter(keras.backend.backend())


def dtype_of(tensor: Any) -> DType:
    """The dtype of a tensor or variable."""
    dtype: DType = np.dtype(keras.backend.standardize_dtype(tensor.dtype))
    return dtype


def nbytes(variable: Any) -> int:
    """The bytes of a variable, or of its outline."""
    size: int = math.prod(variable.shape) * dtype_of(variable).itemsize
    return size
