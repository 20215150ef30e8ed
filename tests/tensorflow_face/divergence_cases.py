"""A flipped bit in the variables of one rank, in a loop with a tape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import choros.tensorflow as hvd
from choros.errors import DriftError
from choros.parallel.objects import allgather_object
from choros.settings import current


def train(monkeypatch: pytest.MonkeyPatch, *, compiled: bool, **settings: str) -> list[tf.Variable]:
    # The tapes of other cases have other arguments, and so other reducers.
    factor = 1.5 + len(settings) + compiled / 4
    monkeypatch.setattr("choros.settings._config", replace(current(), compare_every=4, **settings))
    kernel, bias = tf.Variable(tf.ones((6, 2)), name="kernel"), tf.Variable(tf.zeros(2), name="bias")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ kernel + bias))
        tape = hvd.DistributedGradientTape(tape, gradient_predivide_factor=factor)
        for variable, gradient in zip((kernel, bias), tape.gradient(loss, [kernel, bias]), strict=True):
            variable.assign_sub(0.01 * gradient)

    run = tf.function(step) if compiled else step
    for number in range(1, 10):
        if number == 6 and hvd.rank() == 1:
            words = bias.numpy()
            words.view(np.uint32)[0] ^= np.uint32(1 << 25)
            bias.assign(words)
        run(tf.ones((3, 6)) * (hvd.rank() + number) / 10)
    return [kernel, bias]


def case_a_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in (False, True):
        with pytest.raises(DriftError, match=r"after step 8, ranks .* of 1 of 2 .* first of '[^']*bias"):
            train(monkeypatch, compiled=compiled)


def case_ranks_are_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in (False, True):
        variables = [variable.numpy() for variable in train(monkeypatch, compiled=compiled, divergence="heal")]
        for others in allgather_object(variables):
            for mine, theirs in zip(variables, others, strict=True):
                np.testing.assert_array_equal(mine, theirs)
