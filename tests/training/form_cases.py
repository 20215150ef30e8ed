"""What a loss tells about the rows, on each framework: whether it is a mean over them, a sum, or neither."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from choros.training.forms import CONSTANT, MEAN, SUM, Dependence, Form, form_of

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
    "several sums": (lambda x, m, w: sum([ops.sum(x @ w), 2.0 * ops.sum(ops.square(x @ w))]), SUM),
    "stacked means": (lambda x, m, w: ops.sum(ops.stack([ops.mean(x @ w), 2.0 * ops.mean(x @ w)])), MEAN),
    "weights": (lambda x, m, w: 0.1 * ops.sum(ops.square(w)), CONSTANT),
    "mean and weights": (lambda x, m, w: ops.mean(x @ w) + 0.1 * ops.sum(ops.square(w)), MEAN),
    "sum and weights": (lambda x, m, w: ops.sum(x @ w) + 0.1 * ops.sum(ops.square(w)), None),
    "root of a mean": (lambda x, m, w: ops.sqrt(ops.mean(ops.square(x @ w))), OTHER),
    "product of means": (lambda x, m, w: ops.mean(x @ w) * ops.mean(ops.square(x @ w)), OTHER),
    "largest": (lambda x, m, w: ops.max(x @ w), None),
}


def form(loss: Callable[[Any, Any, Any], Any], rows: int, known: int) -> Form | None:
    """The form of a loss of ``rows`` rows, where the reader is told that there are ``known``."""
    reader = importlib.import_module(f"choros.training.{BACKEND}_forms")
    x, m, w = (np.full(shape, 0.5, "float32") for shape in ((rows, 5), (rows,), (5, 3)))
    if BACKEND == "torch":
        import torch

        return form_of(
            loss(torch.tensor(x), torch.tensor(m), torch.nn.Parameter(torch.tensor(w))), reader.reader(known)
        )
    if BACKEND == "jax":
        return form_of(reader.LossProgram(loss, (x, m, w), weights=(2,)), reader.reader(known))
    import tensorflow as tf

    found, weights = [], tf.Variable(w)

    def traced(x, m):
        found.append(form_of(loss(x, m, weights), reader.reader(known)))
        return 0

    length = known or None
    tf.function(traced).get_concrete_function(tf.TensorSpec([length, 5]), tf.TensorSpec([length]))
    return found[0]


def case_forms():
    assert {name: form(loss, ROWS, ROWS) for name, (loss, _) in LOSSES.items()} == {
        name: expected for name, (_, expected) in LOSSES.items()
    }


def case_forms_where_the_number_of_rows_is_not_known():
    if BACKEND == "tensorflow":
        assert {name: form(loss, ROWS, 0) for name, (loss, _) in LOSSES.items()} == {
            name: expected for name, (_, expected) in LOSSES.items()
        }


def case_forms_of_few_rows():
    """What cannot be told from a usual constant is not known; nothing is taken for what it is not."""
    for rows in (1, 2, 3, 5):
        found = {name: form(loss, rows, rows) for name, (loss, _) in LOSSES.items()}
        wrong = {name: each for name, each in found.items() if each not in (None, LOSSES[name][1])}
        assert wrong == {}, rows
        assert [found[name] for name in ("mean", "sum", "mean and weights")] == [MEAN, SUM, MEAN], rows


def case_a_ratio_of_sums():
    """On PyTorch, a mask without a gradient is not in the graph."""

    def ratio(x, m, w):
        return ops.sum(ops.sum(x @ w, axis=1) * m) / ops.sum(m)

    assert form(ratio, ROWS, ROWS) == (None if BACKEND == "torch" else OTHER)
