"""What a loss tells about the rows, on each framework: whether it is a mean over them, a sum, or neither."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from choros.training.forms import CONSTANT, MEAN, SUM, Dependence, Form

BACKEND = keras.backend.backend()
OTHER = Form(0, Dependence.OTHER)
ROWS = 8
#: The forms of losses of rows, a mask of them, and weights.
LOSSES: dict[str, tuple[Callable[[Any, Any, Any], Any], Form | None]] = {
    "mean": (lambda x, m, w: ops.mean(ops.square(x @ w)), MEAN),
    "mean of sums": (lambda x, m, w: 0.5 * ops.mean(ops.sum(ops.square(x @ w), axis=1)), MEAN),
    "sum": (lambda x, m, w: -0.5 * ops.sum(1 + x @ w), SUM),
    "sum of means": (lambda x, m, w: ops.sum(ops.mean(x @ w, axis=1)), SUM),
    "mean, then sum": (lambda x, m, w: ops.sum(ops.mean(x @ w, axis=0)), MEAN),
    "divided by the rows": (lambda x, m, w: ops.sum(x @ w) / ops.cast(ops.shape(x)[0], "float32"), MEAN),
    "divided by rows that may be none": (lambda x, m, w: ops.divide_no_nan(ops.sum(x @ w), ops.shape(x)[0]), MEAN),
    "multiplied by a choice": (lambda x, m, w: ops.where(ops.size(x) > 1, 2.0, 0.5) * ops.sum(x @ w), SUM),
    "divided by the elements": (lambda x, m, w: ops.sum(x @ w) / ops.cast(ops.size(x @ w), "float32"), MEAN),
    "unless there are none": (lambda x, m, w: ops.sum(ops.cond(ops.shape(x)[0] == 0, lambda: 0 * x, lambda: x)), SUM),
    "several sums": (lambda x, m, w: sum([ops.sum(x @ w), 2.0 * ops.sum(ops.square(x @ w))]), SUM),
    "stacked means": (lambda x, m, w: ops.sum(ops.stack([ops.mean(x @ w), 2.0 * ops.mean(x @ w)])), MEAN),
    "weights": (lambda x, m, w: 0.1 * ops.sum(ops.square(w)), CONSTANT),
    "mean and weights": (lambda x, m, w: ops.mean(x @ w) + 0.1 * ops.sum(ops.square(w)), MEAN),
    "sum and weights": (lambda x, m, w: ops.sum(x @ w) + 0.1 * ops.sum(ops.square(w)), None),
    "root of a mean": (lambda x, m, w: ops.sqrt(ops.mean(ops.square(x @ w))), OTHER),
    "product of means": (lambda x, m, w: ops.mean(x @ w) * ops.mean(ops.square(x @ w)), OTHER),
    "sum of a function of each": (lambda x, m, w: ops.sum(ops.exp(-ops.square(x[:, :3] - w[:3, 0]))), SUM),
    "mean of a choice": (lambda x, m, w: ops.mean(ops.where(x > 0, x, 0.1 * x) @ w), MEAN),
    "sum of a part": (lambda x, m, w: ops.sum((x @ w)[:, :2]), SUM),
    "one after the other": (lambda x, m, w: ops.mean(ops.concatenate([x @ w, -ops.square(x @ w)], axis=0)), MEAN),
    "sum of both": (lambda x, m, w: ops.sum(ops.concatenate([x @ w, -ops.square(x @ w)], axis=0)), SUM),
    "first of both": (lambda x, m, w: ops.mean(ops.concatenate([x @ w, -x @ w], axis=0)[: ops.shape(x)[0]]), MEAN),
    "transposed": (lambda x, m, w: ops.mean(ops.conv_transpose(x[:, :, None], w[:, :, None], strides=2)), MEAN),
    "product over the rows": (lambda x, m, w: ops.sum(ops.transpose(x) @ x @ w), SUM),
    "rows with rows": (lambda x, m, w: ops.mean(ops.tanh(x @ ops.transpose(x)) @ x @ w), MEAN),
    "a power": (lambda x, m, w: ops.sum(ops.power(2.0, x @ w) + ops.power(ops.abs(x), ops.abs(x))[:, :3]), SUM),
    "square of it": (lambda x, m, w: ops.sum(ops.square(ops.transpose(x) @ x)), Form(2, Dependence.OTHER)),
    "entropy": (lambda x, m, w: ops.mean(ops.sum(ops.softmax(x @ w) * ops.log_softmax(x @ w), axis=1)), MEAN),
    "a tenth of a mean": (lambda x, m, w: 0.1 * ops.mean(x @ w) / 2.0, MEAN),
    "a half of a sum": (lambda x, m, w: ops.sum(0.5 * (x @ w)), SUM),
    "means of features": (lambda x, m, w: ops.mean(x @ w, axis=0), MEAN),
    "weights as they are": (lambda x, m, w: ops.abs(w), CONSTANT),
    "one of each row": (lambda x, m, w: ops.sum(x @ w, axis=1), SUM),
    "largest": (lambda x, m, w: ops.max(x @ w), OTHER),
}


def form(loss: Callable[[Any, Any, Any], Any], rows: int, known: int, features: int = 5) -> Form | None:
    """The form of a loss of ``rows`` rows, where the reader is told that there are ``known``."""
    forms = importlib.import_module(f"choros.training.{BACKEND}_forms")
    x, m, w = (np.full(shape, 0.5, "float32") for shape in ((rows, features), (rows,), (features, 3)))
    numbers = frozenset([known] if known else [])
    if BACKEND == "torch":
        import torch

        with forms.noted(numbers):
            return forms.total(loss(torch.tensor(x), torch.tensor(m), torch.nn.Parameter(torch.tensor(w))), numbers)
    if BACKEND == "jax":
        return forms.total(forms.LossProgram(loss, (x, m, w), weights=(2,)), numbers)
    import tensorflow as tf

    found, weights = [], tf.Variable(w)

    def traced(x, m):
        found.append(forms.total(loss(x, m, weights), numbers))
        return 0

    length = known or None
    tf.function(traced).get_concrete_function(tf.TensorSpec([length, features]), tf.TensorSpec([length]))
    return found[0]


def case_forms():
    assert {name: form(loss, ROWS, ROWS) for name, (loss, _) in LOSSES.items()} == {
        name: expected for name, (_, expected) in LOSSES.items()
    }


def case_forms_of_as_many_features_as_rows():
    for features in (ROWS, 2 * ROWS):
        found = {name: form(loss, ROWS, ROWS, features) for name, (loss, _) in LOSSES.items()}
        assert found == {name: expected for name, (_, expected) in LOSSES.items()}, features


def case_forms_where_the_number_of_rows_is_not_known():
    if BACKEND == "tensorflow":
        assert {name: form(loss, ROWS, 0) for name, (loss, _) in LOSSES.items()} == {
            name: expected for name, (_, expected) in LOSSES.items()
        }


def case_lengths_of_tensorflows_arrays():
    """Graphs have them as operations, or as constants where the number of rows is known."""
    import tensorflow as tf

    of_rows = [
        lambda shape: shape[0],
        lambda shape: shape[-2],
        lambda shape: tf.reduce_prod(shape),
        lambda shape: tf.reduce_prod(shape[:1]),
        lambda shape: tf.reduce_prod(tf.cast(shape, "float32")),
        lambda shape: tf.unstack(shape)[0],
        lambda shape: tf.gather(shape, 0),
        lambda shape: tf.concat([shape, [3]], 0)[0],
    ]
    others = [lambda shape: shape[1], lambda shape: tf.reduce_prod(shape[1:])]
    for known in (0, ROWS):
        for length in (*of_rows, *others):
            found = form(
                lambda x, m, w, length=length: tf.reduce_sum(x @ w) / tf.cast(length(tf.shape(x)), "float32"),
                ROWS,
                known,
            )
            # A constant that is a multiple of the rows may be another number.
            expected = {SUM} if length in others else {MEAN, None} if known else {MEAN}
            assert found in expected, (known, length)
        # Half of each rank's rows are not half of all.
        assert form(lambda x, m, w: tf.reduce_mean((x @ w)[: tf.shape(x)[0] // 2]), ROWS, known) is None


def case_forms_of_few_rows():
    """What cannot be told from a usual constant is not known; nothing is taken for what it is not."""
    for rows in (1, 2, 3, 5, 10):
        found = {name: form(loss, rows, rows) for name, (loss, _) in LOSSES.items()}
        wrong = {name: each for name, each in found.items() if each not in (None, LOSSES[name][1])}
        assert wrong == {}, rows
        assert [found[name] for name in ("mean", "sum", "mean and weights")] == [MEAN, SUM, MEAN], rows


def case_a_ratio_of_sums():
    def ratio(x, m, w):
        return ops.sum(ops.sum(x @ w, axis=1) * m) / ops.sum(m)

    assert form(ratio, ROWS, ROWS) == OTHER


#: What losses are made of: arrays of rows, functions of each row, numbers of each row, and numbers of all rows.
ARRAYS = ("x", "(x @ w)")
FUNCTIONS = ("{0}", "ops.tanh({0})", "({0} * m[:, None])", "ops.where({0} > 0, {0}, 0.1 * {0})", "({0} - 0.5)")
NUMBERS = ("{0}", "ops.sum({0}, axis=1)", "ops.mean({0}, axis=-1)", "m * ops.max({0}, 1)", "ops.logsumexp({0}, axis=1)")
TOTALS = (
    "ops.sum({0})",
    "ops.mean({0})",
    "ops.sum(ops.mean({0}, axis=0))",
    "ops.sum({0}) / ops.cast(ops.shape(x)[0], 'float32')",
    "ops.sum({0}) / ops.cast(ops.size({0}), 'float32')",
    "ops.divide_no_nan(ops.sum({0}), ops.cast(ops.shape(x)[0], 'float32'))",
    "ops.sum(ops.stack([ops.mean({0}), ops.mean({1})]))",
    "ops.sum({0}) - 0.5 * ops.sum({1})",
    "0.3 * ops.sum(ops.concatenate([{0}, {0}], axis=0))",
    "ops.sqrt(ops.mean(ops.square({0})))",
    "ops.sum({0}) / ops.sum(m)",
)


def case_what_is_read_is_what_is_computed():
    """Of rows in two parts, a sum is the sum of those of the parts, and a mean their weighted mean."""
    generator = np.random.default_rng(0)
    parts = [
        [generator.normal(scale=scale, size=(n, 5)).astype("float32"), generator.random(n, "float32")]
        for n, scale in ((ROWS, 1.0), (13, 0.2))
    ]
    parts.append([np.concatenate(arrays) for arrays in zip(*parts, strict=True)])
    weights = ops.convert_to_tensor(generator.normal(size=(5, 3)).astype("float32"))
    found = set()
    for total in TOTALS * 5:
        made = []
        for _ in range(2):
            text = str(generator.choice(ARRAYS))
            for kinds in (FUNCTIONS, FUNCTIONS, NUMBERS):
                text = str(generator.choice(kinds)).format(text)
            made.append(text)
        loss = eval(f"lambda x, m, w: {total.format(*made)}", {"ops": ops})
        one, other, both = (float(loss(*map(ops.convert_to_tensor, each), weights)) for each in parts)
        sum_of_both, mean_of_both = one + other, (ROWS * one + 13 * other) / (ROWS + 13)
        is_sum, is_mean = (np.isclose(both, each, rtol=1e-4, atol=1e-5) for each in (sum_of_both, mean_of_both))
        read = form(loss, ROWS, ROWS)
        assert (read == SUM, read == MEAN) == (is_sum, is_mean), (total.format(*made), read)
        found.add(read)
    assert found == {SUM, MEAN, OTHER}


def case_pytorchs_own_losses():
    """The reduction of most of them is a default, of which operations are not told."""
    if BACKEND == "torch":
        from torch.nn import functional

        given = (({}, MEAN), ({"reduction": "mean"}, MEAN), ({"reduction": "sum"}, SUM))
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
            own = getattr(functional, name)
            for how, expected in given:
                found = form(lambda x, m, w, own=own, how=how: own(x @ w, 0.5 * (x @ w), **how), ROWS, ROWS)
                assert found == expected, (name, how)
