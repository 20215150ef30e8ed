"""The weights of a step on each rank: how losses and metrics of its rows become those of the global batch.

The reducer weights a rank's gradient by ``examples / global examples``, which is right for a loss that is a mean over
examples. A loss that divides by something else is scaled by the rest, where it is computed, so that the weighted sum
over the ranks is the loss of the global batch::

    the loss divides by            the factor on this rank
    examples (Keras' default)      1: nothing is exchanged
    rows of a part of the batch    as weights: parts with different numbers of rows have different shares
    nothing (sum, or a vector)     global examples / examples
    weights, or unmasked steps     (divisor / global divisor) * (global examples / examples)

A ``Mean`` that is given one number for a whole batch counts it as one: here it counts as this rank's share of the
examples, so that all ranks' parts of a batch count as one together.

The global numbers are exchanged in the forward pass, and only by steps that contain such a loss or metric::

    rank 0              rank 1              rank 2, without rows
    31 examples         17 examples         joined                  agree: the examples of each rank
    divisor 12.5   +    divisor 3.0    +    0                       allreduce: the global divisor
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArraySpec, framework_adapter
from choros.comm import Communicator, ProcessSet, Reduction, Request
from choros.comm.request import caller
from choros.parallel.reduce.joining import Participation
from choros.training import own_losses
from choros.training.differentiation import scaled_gradients
from choros.training.keras_internals import apply_mask, patched_reductions

__all__ = ["ModelStep", "correction", "current_step", "participation", "run_step", "step_of_this_thread", "try_step"]

_SHARE = Request("examples of a batch")
_DIVISOR = Request("divisor of a loss")
#: In a training step of the user's own, what is not computed in each step has that many to be read in.
_FIRST_STEPS = 16
_SCALAR = ArraySpec((), np.dtype(np.float32))
#: More losses than a step has: tests have them, too, and no gradient after them.
_MANY = 64


@final
@dataclass(frozen=True)
class ModelStep:
    """A step of a model on this rank.

    Attributes:
        examples: the number of examples in its batch, of the array with the most: a number, or a tensor in a compiled
            function. With 0 it computes on a row that counts nowhere (``absent_rows.py``).
        process_set: the ranks that train together.
        weighted: whether the loss of a rank counts by its examples; otherwise the ranks' losses are added.
        of_all_ranks: whether the batch is the global one, so that nothing has to be weighted.
        exchanges: returns whether the other ranks make this step too; asked whenever the step runs.
        trains: whether gradients of its losses are reduced.
        rows: the numbers of rows of the batch's arrays; empty in a function that is compiled for any.
        by_part: whether arrays of a batch may have different numbers of rows, so that means do not divide by examples.
        own_methods: those of the model's methods that are not Keras'.
        decided: which of the losses that Keras has not computed are sums over the rows, as earlier batches have shown,
            and how many steps have noted that.
        numbers: counts the losses that Keras has not computed.
        marked: those of them that a trial has marked, and the lines that have computed them; ``None`` if it is none.
    """

    examples: Any
    process_set: ProcessSet
    weighted: bool = True
    of_all_ranks: bool = False
    exchanges: Callable[[], bool] = lambda: True
    trains: bool = True
    rows: frozenset[int] = frozenset()
    by_part: bool = False
    own_methods: frozenset[str] = frozenset()
    decided: dict[Any, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    marked: dict[str, str | None] | None = None
    thread: int = field(default_factory=threading.get_ident)

    @property
    def weight(self) -> Any:
        """The weight of this rank's loss: its examples, or 1 where losses are added; 0 without any rows."""
        if self.weighted:
            return self.examples
        return min(self.examples, 1) if isinstance(self.examples, int) else keras.ops.minimum(self.examples, 1)


_current: ModelStep | None = None


def current_step() -> ModelStep | None:
    """The step that is running, or being compiled; ``None`` outside of all steps."""
    return _current


@contextmanager
def run_step(step: ModelStep) -> Iterator[None]:
    """A context in which ``step`` runs: Keras' losses and metrics are weighted for it."""
    with _in_place(step):
        if step.of_all_ranks:
            yield
            return
        reductions = patched_reductions(_reduce_loss, _reduce_samples, _sum_added, _compute_loss)
        with reductions, scaled_gradients(_factor_of_gradients), _noted(step):
            yield


def try_step(step: ModelStep, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Finds out which losses are sums over the rows, where only the program of a step tells: on JAX.

    Args:
        step: the step, which runs.
        run: its function, which is traced, and not run.
        arguments: those of the function; the first has the weights.
    """
    tried = ("tried", step.trains)
    if step.of_all_ranks or tried in step.decided or not own_losses.reads_programs():
        return
    marked: dict[str, str | None] = {}
    with _in_place(replace(step, numbers=itertools.count(1), marked=marked)):
        forms = own_losses.forms_of_marked(run, arguments, step.rows)
    for name, line in marked.items():
        is_sum = own_losses.decide(forms.get(name), name, line, step.process_set, warns=step.trains)
        step.decided[name, step.trains, 0] = is_sum
    step.decided[tried] = True


@contextmanager
def _in_place(step: ModelStep) -> Iterator[None]:
    global _current
    outer, _current = _current, step
    try:
        yield
    finally:
        _current = outer


@contextmanager
def _noted(step: ModelStep) -> Iterator[None]:
    """The first steps note how losses are computed, where that costs time: on PyTorch."""
    noted = ("noted steps", step.trains)
    first = _FIRST_STEPS if "train_step" in step.own_methods else 1
    if step.decided.get(noted, 0) >= first:
        yield
        return
    with own_losses.noted(step.rows):
        yield
    step.decided[noted] = step.decided.get(noted, 0) + (not own_losses.is_unsure(step.rows))


def participation(process_set: ProcessSet) -> Participation:
    """How a rank without rows participates in what losses and metrics exchange."""

    def add_nothing(_: Sequence[int]) -> None:
        process_set.communicator.reduce_in_place(np.zeros(1), Reduction.SUM)

    return {_SHARE: lambda _: None, _DIVISOR: add_nothing}


def _reduce_loss(
    own: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """``reduce_weighted_values`` of Keras' losses, called as ``own``, times the factor of this rank."""
    step = step_of_this_thread()
    weighted = sample_weight is not None or mask is not None
    is_scalar = len(getattr(values, "shape", ())) == 0 and not weighted
    divisor = None  # unless it is the number of values in the rows of the batch
    if step is not None and reduction == "mean_with_sample_weight" and weighted:
        given = None if sample_weight is None else keras.ops.copy(sample_weight)  # Keras multiplies torch's in place
        divisor = keras.ops.sum(apply_mask(given, mask, keras.backend.floatx(), reduction))
    elif step is not None and reduction in ("mean", "sum_over_batch_size", "mean_with_sample_weight"):
        if mask is not None:
            divisor = keras.ops.sum(keras.ops.cast(mask, "float32"))
        elif step.by_part and not is_scalar:
            divisor = keras.ops.shape(values)[0]
    loss = own(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if step is not None and divisor is not None:
        loss = keras.ops.sum(loss)  # of no rows, Keras returns no number
        loss = loss * keras.ops.cast(_factor_of_divisor(step, keras.ops.cast(divisor, "float32")), loss.dtype)
    if step is not None and is_scalar:
        return _of_all_ranks_if_sum(step, loss, "the result of a loss function")
    if step is not None and reduction == "sum":
        loss = _added(step, loss)
    if step is not None and reduction not in (None, "none"):
        loss = own_losses.mark_known(loss)
    return loss


def _reduce_samples(own: Callable[..., Any], values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> Any:
    """``reduce_to_samplewise_values`` of Keras' ``Mean`` and ``Sum``, called as ``own``, for numbers of a batch."""
    values, sample_weight = own(values, sample_weight, reduce_fn, dtype)
    step = step_of_this_thread()
    if step is None or reduce_fn is not keras.ops.mean or sample_weight is not None or len(values.shape) > 0:
        return values, sample_weight
    share = keras.ops.cast(_share_of_examples(step, values), values.dtype)
    if "train_step" in step.own_methods and own_losses.is_surely_sum(values, step.rows):
        return values, share
    return values * share, share


def _sum_added(own: Callable[..., Any], model: Any, value: Any) -> Any:
    """Keras' sum of a value of ``add_loss``, called as ``own``: over all ranks' rows, if the value has any."""
    step = step_of_this_thread()
    if step is None:
        return own(model, value)
    return _of_all_ranks_if_sum(step, value, "a value of add_loss", functools.partial(own, model))


def _compute_loss(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's ``compute_loss``, called as ``own``: over all ranks' rows, if it is the user's, and a sum."""
    loss, step = own(model, *args, **kwargs), step_of_this_thread()
    if step is None or loss is None or "compute_loss" not in step.own_methods:
        return loss
    return _of_all_ranks_if_sum(step, loss, "the result of compute_loss")


def _of_all_ranks_if_sum(step: ModelStep, loss: Any, what: str, total: Callable[[Any], Any] = keras.ops.sum) -> Any:
    """The total of what the user's code has computed, over all ranks' rows if it is a sum over this rank's.

    Args:
        step: the step.
        loss: a number, or several.
        what: of what.
        total: adds them up.
    """
    name = f"{what} ({next(step.numbers)})"
    if step.marked is not None:
        step.marked[name] = caller()
        return total(own_losses.mark(loss, name))
    return _of_all_ranks(step, total(loss), _is_sum(step, loss, name))


def _of_all_ranks(step: ModelStep, loss: Any, is_sum: bool) -> Any:
    """A loss that the user's code has computed, over all ranks' rows if it is a sum over this rank's."""
    return own_losses.mark_known(_added(step, loss) if is_sum else loss)


def _added(step: ModelStep, loss: Any) -> Any:
    """A sum over this rank's rows, such that the weighted mean of the ranks' is the sum over all of them."""
    weighted = loss / keras.ops.cast(_share_of_examples(step, loss, of_loss=True), loss.dtype)
    return weighted if step.weighted else loss + keras.ops.stop_gradient(weighted - loss)


def _is_sum(step: ModelStep, loss: Any, what: str, *, by_calls: bool = False) -> bool:
    with _in_place(replace(step, numbers=itertools.count(1))):  # a program that is read is traced once more
        return own_losses.is_sum(
            loss, what, step.rows, step.decided, step.process_set, by_calls=by_calls, warns=step.trains
        )


def _factor_of_gradients(target: Any) -> Any:
    """The factor of the gradients of ``target``, of a vector those of its sum; ``None`` for 1."""
    step = step_of_this_thread()
    if step is None or step.marked is not None or not (step.trains and step.weighted):
        return None
    if "train_step" not in step.own_methods or not _is_sum(step, target, "a loss of the training step", by_calls=True):
        return None
    return 1 / _share_of_examples(step, keras.ops.convert_to_tensor(step.examples, "int32"), of_loss=True)


def step_of_this_thread() -> ModelStep | None:
    """The step that this thread runs or compiles; ``None`` outside of all steps, and in other threads."""
    return _current if _current is not None and _current.thread == threading.get_ident() else None


def _share_of_examples(step: ModelStep, like: Any, *, of_loss: bool = False) -> Any:
    """This rank's share of the global batch, a scalar; ``like`` makes it part of the function that computes it."""

    def on_host(examples: int, _: NDArray[Any]) -> float:
        share = _exchanged_share(step.process_set.communicator, examples)
        if of_loss:
            _weighted.note(step, lambda each: _inverse(_exchanged_share(each, examples)), _inverse(share))
        return share

    return _on_host(on_host, step, like)


def _factor_of_divisor(step: ModelStep, divisor: Any) -> Any:
    """The factor of a loss that divides by ``divisor``."""

    def on_host(examples: int, divisor: NDArray[Any]) -> float:
        own = float(divisor) if examples else 0.0
        factor = _exchanged_factor(step.process_set.communicator, own, examples)
        _weighted.note(step, lambda each: _exchanged_factor(each, own, examples), factor)
        return factor

    return _on_host(on_host, step, divisor)


def _exchanged_share(communicator: Communicator, examples: int) -> float:
    return examples / sum(communicator.atomic(lambda: communicator.agree(_SHARE, value=examples)))


def _exchanged_factor(communicator: Communicator, divisor: float, examples: int) -> float:
    def collective() -> float:
        total = np.array([divisor])
        everywhere = sum(communicator.agree(_DIVISOR, value=examples))
        communicator.reduce_in_place(total, Reduction.SUM)
        return divisor / total[0] * everywhere / examples if divisor else 0.0

    return communicator.atomic(collective)


def _inverse(share: float) -> float:
    return 1 / share if share else 0.0


@final
class _WeightedLosses:
    """The losses of the current step, in an elastic job: ranks may be lost after they were weighted for all of them."""

    def __init__(self) -> None:
        self._losses: list[tuple[ProcessSet, tuple[int, ...], Callable[[Communicator], float], float]] = []
        self._step_ends = False

    def note(self, step: ModelStep, exchange: Callable[[Communicator], float], factor: float) -> None:
        """Notes a loss that was weighted by ``factor``, which ``exchange`` computes again."""
        process_set = step.process_set
        if not (process_set.communicator.elastic and step.trains):
            return
        if self._step_ends or len(self._losses) >= _MANY:
            self._losses.clear()
        self._step_ends = False
        self._losses.append((process_set, process_set.communicator.launched, exchange, factor))

    def correction(self) -> float:
        """Returns the factor by which the gradients must be multiplied; all ranks of the step call this.

        Several losses whose factors have changed differently cannot be told apart in a gradient: the mean is taken.
        """
        self._step_ends = True
        ratios = []
        for process_set, launched, exchange, factor in self._losses:
            communicator = process_set.communicator
            if communicator.launched != launched:
                new = exchange(communicator)
                ratios.append(new / factor if factor else 1.0)
        return sum(ratios) / len(ratios) if ratios else 1.0


_weighted = _WeightedLosses()


def correction() -> float:
    """Returns the factor of gradients whose loss was weighted for ranks of which some were lost since."""
    return _weighted.correction()


def _on_host(function: Callable[[int, NDArray[Any]], float], step: ModelStep, value: Any) -> Any:
    """Calls ``function(examples, value)`` on the host if ranks exchange; 1 otherwise."""

    def call(hosts: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        examples, host = hosts
        result = function(int(examples), host) if step.exchanges() else 1.0
        return [np.asarray(result, np.float32)]

    arrays = [keras.ops.convert_to_tensor(step.examples, "int32"), keras.ops.stop_gradient(value)]
    (result,) = framework_adapter(keras.backend.backend()).host_call(call, arrays, [_SCALAR])
    return result
