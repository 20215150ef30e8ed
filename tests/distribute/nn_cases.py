"""Losses of custom loops on two replicas, in the arrays of each framework."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import choros
from arrays.frameworks import FRAMEWORK, compiled, dtype_name, make
from choros import distribute, nn
from choros.arrays import adapter_of
from choros.comm import BFLOAT16
from choros.errors import ConfigError, StrategyError

import_module(FRAMEWORK)
STRATEGY = distribute.MirroredStrategy()
#: tf.nn returns 1.25 for these: the replicas have batches of two examples and of one.
LOSSES = (np.array([0.0, 1.0], np.float32), np.array([2.0], np.float32))


def on_replica(function: Callable[..., Any], *args: Any) -> Any:
    return STRATEGY.run(function, args=args)


def own_losses() -> Any:
    return make(LOSSES[choros.rank()])


def total(value: Any) -> float:
    """The sum over the replicas."""
    return float(choros.parallel.ops.allreduce(float(value), choros.comm.Reduction.SUM))


def case_replicas_with_uneven_batches_average_over_examples() -> None:
    assert total(on_replica(nn.compute_average_loss, own_losses())) == pytest.approx(1.0)
    assert total(on_replica(compiled(nn.compute_average_loss), own_losses())) == pytest.approx(1.0)
    assert total(
        on_replica(lambda loss: nn.compute_average_loss(loss, global_batch_size=3), own_losses())
    ) == pytest.approx(1.0)
    if FRAMEWORK == "tensorflow":
        tf = sys.modules["tensorflow"]
        signature = [tf.TensorSpec([None])]
        assert total(
            on_replica(tf.function(nn.compute_average_loss, input_signature=signature), own_losses())
        ) == pytest.approx(1.0)


def case_batch_sizes_of_a_compiled_step_may_differ_between_replicas() -> None:
    step = compiled(nn.compute_average_loss)
    for rows in ((2, 2), (2, 2), (2, 1), (2, 0)):
        losses = make(np.full(rows[choros.rank()], 3.0, np.float32))
        assert total(on_replica(step, losses)) == pytest.approx(3.0)


def case_losses_of_several_outputs_per_example_are_summed() -> None:
    losses = make(np.ones((2, 3), np.float32))
    assert total(on_replica(nn.compute_average_loss, losses)) == 3.0


def case_weights_multiply_and_do_not_divide() -> None:
    rank = choros.rank()
    for weights in (np.array([3.0, 2.0]), np.array([[3.0], [2.0]]), [3.0, 2.0]):
        own = weights[: 2 - rank]
        for given in (own, make(np.asarray(own, np.float32))):
            loss = on_replica(lambda loss, w=given: nn.compute_average_loss(loss, sample_weight=w), own_losses())
            assert total(loss) == pytest.approx((0 * 3 + 1 * 2 + 2 * 3) / 3)
    rows = make(np.ones((2, 3), np.float32))
    weighted = on_replica(lambda loss: nn.compute_average_loss(loss, make(np.array([1.0, 0.5], np.float32))), rows)
    assert total(weighted) == pytest.approx(2.25)


def case_the_dtype_is_kept_and_sums_are_float32() -> None:
    halves = make(np.full(4096, 1.0, np.float16))
    loss = on_replica(lambda loss: nn.compute_average_loss(loss, global_batch_size=8192), halves)
    assert (dtype_name(loss), float(loss)) == ("float16", 0.5)
    assert dtype_name(on_replica(nn.compute_average_loss, make(np.ones(2, BFLOAT16)))) == "bfloat16"


def case_an_empty_batch_returns_zero() -> None:
    nothing = make(np.zeros(0, np.float32))
    assert float(on_replica(nn.compute_average_loss, nothing)) == 0.0
    assert float(on_replica(lambda loss: nn.compute_average_loss(loss, global_batch_size=0), own_losses())) == 0.0


def case_gradients_flow() -> None:
    loss = own_losses()
    if FRAMEWORK == "torch":
        loss.requires_grad_()
        on_replica(nn.compute_average_loss, loss).backward()
        gradient = loss.grad
    elif FRAMEWORK == "jax":
        gradient = on_replica(sys.modules["jax"].jit(sys.modules["jax"].grad(nn.compute_average_loss)), loss)
    else:
        with sys.modules["tensorflow"].GradientTape() as tape:
            tape.watch(loss)
            value = on_replica(nn.compute_average_loss, loss)
        gradient = tape.gradient(value, loss)
    np.testing.assert_allclose(adapter_of(gradient).to_host(gradient), np.full(2 - choros.rank(), 1 / 3), rtol=1e-6)


def case_regularization_is_added_once() -> None:
    assert total(on_replica(nn.scale_regularization_loss, 0.5)) == 0.5
    assert total(on_replica(nn.scale_regularization_loss, make(np.array([0.5, 1.0], np.float32)))) == 1.5


def case_invalid_uses_raise_errors_with_advice() -> None:
    with STRATEGY.scope():
        for function in (nn.compute_average_loss, nn.scale_regularization_loss):
            with pytest.raises(StrategyError, match=r"call it in the function that strategy\.run runs"):
                function(own_losses())
    with pytest.raises(ConfigError, match="compute it with reduction=None"):
        nn.compute_average_loss(make(np.array(1.0, np.float32)))
    for size in (2.5, -1, [3], make(np.array([3]))):
        with pytest.raises(ConfigError, match=r"expected an integer|fewer than 0"):
            nn.compute_average_loss(own_losses(), global_batch_size=size)


def case_outside_of_all_strategies_it_is_the_mean() -> None:
    assert float(nn.compute_average_loss(make(np.array([1.0, 2.0], np.float32)))) == 1.5


def case_it_equals_tf_nn_on_one_replica() -> None:
    if FRAMEWORK != "tensorflow":
        return
    tf = sys.modules["tensorflow"]
    generator = np.random.default_rng(0)
    for shape, weights in (((5,), None), ((5,), (5,)), ((5, 3), (5,)), ((5, 3), (5, 1)), ((5,), (5, 1)), ((5, 3), ())):
        loss = tf.constant(generator.normal(size=shape), tf.float32)
        weight = None if weights is None else tf.constant(generator.uniform(size=weights), tf.float32)
        for size in (None, 7):
            theirs = tf.nn.compute_average_loss(loss, weight, size)
            np.testing.assert_allclose(nn.compute_average_loss(loss, weight, size), theirs, rtol=1e-6)


def case_all_reduce_of_a_structure_is_one_collective_with_a_gradient() -> None:
    communicator = choros.global_process_set.communicator

    def step(x: Any) -> Any:
        context = distribute.get_replica_context()
        reduced = context.all_reduce("SUM", {"a": x, "b": (x * 2, None)})
        return reduced["a"] + reduced["b"][0]

    before = communicator.collectives
    x = make(np.array([1.0, 2.0], np.float32) * (1 + choros.rank()))
    for call in (step, compiled(step)):
        result = on_replica(call, x)
        np.testing.assert_array_equal(adapter_of(result).to_host(result), [9.0, 18.0])
    assert communicator.collectives == before + 2


def case_all_gather_along_any_dimension() -> None:
    x = make(np.arange(6, dtype=np.float32).reshape(2, 3))
    for axis in (0, 1, -1):
        gathered = on_replica(lambda x, a=axis: distribute.get_replica_context().all_gather(x, a), x)
        host = adapter_of(x).to_host(x)
        np.testing.assert_array_equal(adapter_of(gathered).to_host(gathered), np.concatenate([host, host], axis))
    with pytest.raises(ConfigError, match=r"gather\(axis=2\): the value has the shape \(2, 3\)"):
        on_replica(lambda: distribute.get_replica_context().all_gather(x, 2))
