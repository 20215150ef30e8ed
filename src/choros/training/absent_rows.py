"""A step of a rank that has no rows of a batch, while the epoch goes on: it computes on a row that counts nowhere.

::

    rank 0, 1 row                      rank 1, without rows
    loss of its row                    loss of a row of zeros                 the same program: the same messages
    divisors, moments, assignments ─── nothing                                ModelStep.examples is 0
    gradients ──────────────────────── nothing
    update                             the same update
    metrics, own statistics            those from before the step

At the end of its batches a rank joins instead (``comm/joining.py``): it need not know how many are left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.parallel.structure import map_structure
from choros.training.keras_internals.fit import JAX_STATE
from choros.training.keras_internals.models import build_metrics

_NON_TRAINABLE, _METRICS = JAX_STATE.index("non_trainable_variables"), -1


def step_without_rows(
    model: Any, own: Callable[..., Any], arguments: Sequence[Any], absent: Any, local: Callable[[], Sequence[Any]]
) -> Any:
    """Runs a step that may have no rows: logs are then those of before. ``local``: what steps assign, not metrics."""
    *state, data = arguments
    padded = map_structure(lambda leaf: _with_row(leaf, absent), data)
    if state:
        return _stateless(model, own, state[0], padded, local())
    build_metrics(model, lambda: padded)
    kept = [(variable, keras.ops.copy(variable.value)) for variable in (*local(), *model.metrics_variables)]
    logs = own(padded)
    for variable, value in kept:
        variable.assign(_chosen(absent, value, variable.value))
    return _logs(logs, model.get_metrics_result(), absent)


def _stateless(model: Any, own: Callable[..., Any], state: Sequence[Any], data: Any, local: Sequence[Any]) -> Any:
    """The step on JAX, whose state is that of Keras' trainer; it has no optimizer in a test."""
    logs, updated = own(state, data)
    kept = {id(variable) for variable in local}
    updated = list(updated)
    triples = zip(model.non_trainable_variables, state[_NON_TRAINABLE], updated[_NON_TRAINABLE], strict=True)
    updated[_NON_TRAINABLE] = [before if id(variable) in kept else after for variable, before, after in triples]
    updated[_METRICS] = state[_METRICS]
    with keras.StatelessScope(list(zip(model.metrics_variables, state[_METRICS], strict=True))):
        logs = _logs(logs, model.get_metrics_result(), True)
    return logs, tuple(updated)


def _logs(own: Any, before: dict[str, Any], absent: Any) -> Any:
    """The logs of the step, or of those before; a name that is no metric's keeps the step's value."""
    if not isinstance(own, dict):
        return own
    return {name: _chosen(absent, before[name], value) if name in before else value for name, value in own.items()}


def _chosen(absent: Any, before: Any, after: Any) -> Any:
    return before if absent is True else keras.ops.where(absent, before, after)


def _with_row(leaf: Any, absent: Any) -> Any:
    if absent is True:
        return keras.ops.zeros((1, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype))
    import tensorflow as tf

    def one_row() -> Any:
        if isinstance(leaf, tf.RaggedTensor):
            return tf.RaggedTensor.from_row_splits(leaf.values, tf.zeros([2], leaf.row_splits.dtype))
        if isinstance(leaf, tf.SparseTensor):
            row = tf.SparseTensor(leaf.indices, leaf.values, tf.concat([[1], leaf.dense_shape[1:]], 0))
        else:
            row = tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], 0), leaf.dtype)
        row.set_shape([None, *leaf.shape[1:]])
        return row

    return tf.cond(absent, one_row, lambda: leaf)
