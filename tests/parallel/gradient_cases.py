"""Gradients of the collectives, eager and compiled, but for what ``conformance_cases.py`` has; on two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

import choros
from arrays.frameworks import FRAMEWORK, compiled, make
from choros.arrays import adapter_of
from choros.comm import Reduction
from choros.parallel import ops

SIZE = 2
import_module(FRAMEWORK)


def values(rank: int, *shape: int) -> NDArray:
    """Returns the input of a rank, or the weights of its loss."""
    return ((np.arange(np.prod(shape)) * (rank + 2)) % 5 + rank).reshape(shape).astype(np.float32)


def gradients(function: Callable[[Any], Any], host: NDArray, weights: NDArray, known: bool = True) -> Iterator[NDArray]:
    """Yields the gradient of ``sum(function(x) * weights)`` at ``host``, eager and compiled.

    Args:
        function: a function of an array.
        host: its argument.
        weights: factors of the elements of its result.
        known: whether the shape of the result is static, as ``jax.jit`` requires.
    """
    x, w = make(host), make(weights)
    if FRAMEWORK == "torch":
        x.requires_grad_()
        (function(x) * w).sum().backward()
        yield x.grad.numpy()
    elif FRAMEWORK == "jax":
        jax = sys.modules["jax"]

        def loss(x: Any) -> Any:
            return (function(x) * w).sum()

        yield np.asarray(jax.grad(loss)(x))
        if known:
            yield np.asarray(jax.jit(jax.grad(loss))(x))
            yield np.asarray(jax.grad(jax.jit(loss))(x))
    elif FRAMEWORK == "tensorflow":
        tf = sys.modules["tensorflow"]

        def gradient(x: Any, function: Callable[[Any], Any]) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) * w)
            return tape.gradient(loss, x)

        yield gradient(x, function).numpy()
        yield gradient(x, tf.function(function, autograph=False)).numpy()
        signature = [tf.TensorSpec([None] * host.ndim)]
        inside = tf.function(lambda x: gradient(x, function), input_signature=signature, autograph=False)
        yield inside(x).numpy()


def check(function: Callable[[Any], Any], hosts: list, weights: list, expected: list, known: bool = True) -> None:
    """Checks the gradient of this rank; the lists have one entry per rank."""
    rank = choros.rank()
    for gradient in gradients(function, hosts[rank], weights[rank], known):
        np.testing.assert_allclose(gradient, expected[rank], rtol=1e-6)


def case_allgather_of_no_rows() -> None:
    hosts, weights = [values(r, 2 * r, 3) for r in range(SIZE)], [values(r + 2, 2, 3) for r in range(SIZE)]
    check(ops.allgather, hosts, weights, np.split(sum(weights), [0]), known=False)


def case_allgather_along_another_dimension() -> None:
    hosts, weights = [values(r, 2, 3) for r in range(SIZE)], [values(r + 2, 2, 6) for r in range(SIZE)]
    check(lambda x: ops.allgather(x, axis=-1), hosts, weights, np.split(sum(weights), SIZE, axis=1))
    uneven = [values(r, 2, 1 + 2 * r) for r in range(SIZE)]
    weights = [values(r + 2, 2, 4) for r in range(SIZE)]
    expected = np.split(sum(weights), [1], axis=1)
    check(lambda x: ops.allgather(x, axis=1), uneven, weights, expected, known=False)


def case_broadcast_of_both_conventions() -> None:
    hosts, weights = [values(r, 2, 3) for r in range(SIZE)], [values(r + 2, 2, 3) for r in range(SIZE)]
    for horovod_gradients, factor in ((False, 1), (True, 1 / SIZE)):
        expected = [np.zeros((2, 3)), factor * sum(weights)]
        check(lambda x, each=horovod_gradients: ops.broadcast(x, 1, horovod_gradients=each), hosts, weights, expected)


def case_grouped_allgather_and_reducescatter() -> None:
    counts = make(np.array([1, 2], np.int32))
    hosts, weights = [values(r, 2, 3) for r in range(SIZE)], [values(r + 2, 4, 3) for r in range(SIZE)]
    for horovod_gradients, factor in ((False, 1), (True, 1 / SIZE)):

        def gathered(x: Any, horovod_gradients: bool = horovod_gradients) -> Any:
            first, _, second = ops.grouped_allgather([x, counts, 2 * x], horovod_gradients=horovod_gradients)
            return first + second

        check(gathered, hosts, weights, np.split(3 * factor * sum(weights), SIZE))
    weights = [values(r + 2, 1, 3) for r in range(SIZE)]
    for horovod_gradients, factor in ((False, 1 / SIZE), (True, 1)):

        def scattered(x: Any, horovod_gradients: bool = horovod_gradients) -> Any:
            first, _, second = ops.grouped_reducescatter([x, counts, 2 * x], horovod_gradients=horovod_gradients)
            return first + second

        check(scattered, hosts, weights, [3 * factor * np.concatenate(weights)] * SIZE)


def case_grouped_allreduce() -> None:
    hosts, weights = [values(r, 2, 3) for r in range(SIZE)], [values(r + 2, 2, 3) for r in range(SIZE)]
    counts = make(np.array([1, 2], np.int32))

    def function(x: Any) -> Any:
        doubled, added, count = ops.grouped_allreduce([x * 2, x + 1, counts], Reduction.SUM)
        if FRAMEWORK != "tensorflow":  # a tf.custom_gradient function may only use its own results
            assert tuple(count.shape) == (2,)
        return doubled + added

    check(function, hosts, weights, [3 * sum(weights)] * SIZE)


def case_gradient_of_a_gradient() -> None:
    host = values(choros.rank(), 3)

    def square(x: Any) -> Any:
        return ops.allreduce(x, Reduction.SUM) ** 2

    for first, second in _twice(square, host):
        np.testing.assert_allclose(first, 4 * sum(values(r, 3) for r in range(SIZE)))
        np.testing.assert_allclose(second, np.full(3, 8.0))


def _twice(function: Callable[[Any], Any], host: NDArray) -> Iterator[tuple[NDArray, NDArray]]:
    """Yields first and second derivatives of the sum of ``function``."""
    x = make(host)
    if FRAMEWORK == "torch":
        torch = sys.modules["torch"]
        x.requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        yield first.detach().numpy(), second.numpy()
    elif FRAMEWORK == "jax":
        jax = sys.modules["jax"]
        first = jax.grad(lambda x: function(x).sum())
        second = jax.grad(lambda x: first(x).sum())
        yield np.asarray(first(x)), np.asarray(second(x))
        yield np.asarray(jax.jit(first)(x)), np.asarray(jax.jit(second)(x))
    elif FRAMEWORK == "tensorflow":
        tf = sys.modules["tensorflow"]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            first = inner.gradient(y, x)
        yield first.numpy(), outer.gradient(first, x).numpy()


def case_gradients_are_recorded_only_if_required() -> None:
    x = make(values(choros.rank(), 2))
    before = choros.global_process_set.communicator.collectives
    ops.allreduce(x)
    assert choros.global_process_set.communicator.collectives == before + 1
    if FRAMEWORK == "torch":
        torch = sys.modules["torch"]
        x.requires_grad_()
        assert ops.allreduce(x).requires_grad
        with torch.no_grad():
            assert not ops.allreduce(x).requires_grad


def case_grouped_values_keep_their_types() -> None:
    rank = choros.rank()
    array = make(values(rank, 3))
    for call in (lambda function: function, compiled):
        both = call(lambda x: ops.grouped_allreduce([x, x * 2], Reduction.SUM))(array)
        for factor, total in enumerate(both, 1):
            assert type(total) is type(array)
            np.testing.assert_array_equal(adapter_of(total).to_host(total), factor * (values(0, 3) + values(1, 3)))
    number, listed, mean = ops.grouped_allreduce([rank, [1.0, rank], 2.5], Reduction.AVERAGE)
    assert (number, listed.tolist(), mean) == (0.5, [1.0, 0.5], 2.5)


def case_grouped_values_are_one_collective() -> None:
    communicator = choros.global_process_set.communicator
    before = communicator.collectives
    ops.grouped_allreduce([make(values(0, 3)), make(values(1, 2)), make(np.array([1], np.int32))], Reduction.SUM)
    assert communicator.collectives == before + 1
