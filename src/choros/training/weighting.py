"""The weights of a step on each rank: how losses and metrics of its rows become those of the global batch.

A rank's gradient is weighted by ``examples / global examples``, right for means over examples. Other losses are
scaled where they are computed, so that the weighted sum over the ranks is the loss of the global batch::

    the loss divides by            the factor on this rank
    examples (Keras' default)      1: nothing is exchanged
    rows of a part of the batch    as weights: parts with different numbers of rows have different shares
    nothing (sum, or a vector)     global examples / examples
    weights, or unmasked steps     (divisor / global divisor) * (global examples / examples)

A ``Mean`` given one number for a whole batch counts it as this rank's share of the examples. Global numbers are
exchanged in the forward pass, and only by steps that contain such a loss or metric::

    rank 0              rank 1              rank 2, without rows
    31 examples         17 examples         joined                  agree: the examples of each rank
    divisor 12.5   +    divisor 3.0    +    0                       allreduce: the global divisor
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, final

import keras
import numpy as np

from choros.arrays import ArraySpec
from choros.comm import Array, Communicator, ProcessSet, Reduction, Request
from choros.comm.request import CollectiveSpec, caller
from choros.errors import ConfigError
from choros.training.forms import CONSTANT, MEAN, SUM, Dependence, Form
from choros.training.host_gradients import keras_arrays
from choros.training.keras_internals.fit import apply_mask, reductions
from choros.training.replaced import replaced

_SHARE = Request("examples of a batch", spec=CollectiveSpec("agreement"))
_DIVISOR = Request("divisor of a loss", spec=CollectiveSpec("allreduce", (("float64", (1,)),), Reduction.SUM))
#: In a training step of the user's own, what is not computed in each step has that many to be read in.
_FIRST_STEPS = 16
_SCALAR = ArraySpec((), np.dtype(np.float32))
#: From the examples and a number of this rank, what it computes together with the others.
_Exchange = Callable[[Communicator, int, float], float]
_CHECKPOINT = (
    "jax.checkpoint cannot contain what ranks exchange numbers for: losses that are sums or that have weights or "
    "masks, and batch normalization over all ranks. Leave these out of it, as in loss(y, jax.checkpoint(predict)(x))."
)
#: The modules that call training steps.
_CALLERS = ("choros.training.trainer", "choros.training.absent_rows")
#: In place of ``_calls``, of what has a name in its step.
_NO_CALLS = (0, 0)
_NUMBER, _ROWS = "the result of a loss function", "the rows of a loss function's result"
#: More losses than a step has: tests have them, too, and no gradient after them.
_MANY = 64


@final
@dataclass(frozen=True)
class ModelStep:
    """A model's step on this rank; with 0 ``examples`` it computes on a row that counts nowhere (``absent_rows.py``).
    ``weighted``: its loss counts by its examples, else losses are added; ``of_all_ranks``: the batch is the global
    one. ``exchanges()``, whether others make it too, is asked whenever it runs; ``by_part``: rows differ. ``noted``:
    in an elastic job its losses, as ranks may be lost after they were weighted for all; ``None`` ends them.
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
    calls: Counter[int] = field(default_factory=Counter)
    marked: dict[str, str | None] | None = None
    noted: list[tuple[tuple[int, ...], float, Callable[[Communicator], float]] | None] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def weight(self) -> Any:
        """The weight of this rank's loss: its examples, or 1 where losses are added; 0 without any rows."""
        if self.weighted:
            return self.examples
        return min(self.examples, 1) if isinstance(self.examples, int) else keras.ops.minimum(self.examples, 1)

    @property
    def weighs_gradients(self) -> bool:
        """Whether gradients are those of losses that the user's own training step computes."""
        return self.trains and self.weighted and "train_step" in self.own_methods

    def again(self, **changes: Any) -> ModelStep:
        """The same step, to be traced once more."""
        return replace(self, numbers=itertools.count(1), calls=Counter(), **changes)


_current: ModelStep | None = None


def current_step() -> ModelStep | None:
    """The step that is running, or being compiled; ``None`` outside of all steps."""
    return _current


@contextmanager
def run_step(step: ModelStep) -> Iterator[None]:
    """A context in which ``step`` runs: Keras' losses and metrics are weighted for it."""
    with _in_place(step), ExitStack() as stack:
        if not step.of_all_ranks:
            for owner, values in _replacements():
                stack.enter_context(replaced(owner, **values))
            stack.enter_context(_noted(step))
        try:
            yield
        except NotImplementedError as error:
            if "`checkpoint`/`remat`" not in str(error):
                raise
            raise ConfigError(_CHECKPOINT) from error


@functools.cache
def _replacements() -> list[tuple[Any, dict[str, Any]]]:
    own = reductions(_reduce_loss, _reduce_samples, _sum_added, _compute_loss)
    return [*own, *_forms().differentiation(_factor_of_gradients)]


def try_step(step: ModelStep, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Traces, and does not run, a step to find which losses are sums over the rows: on JAX only its program tells. It
    is given a number of rows that tells rows from all else, on all ranks, unless it works with this rank's number only.
    """
    tried = ("tried", step.trains)
    if step.of_all_ranks or tried in step.decided or keras.backend.backend() != "jax":
        return
    step.decided[tried] = True
    for given, rows in (_forms().with_other_rows(arguments, step.rows), (arguments, step.rows)):
        marked: dict[str, str | None] = {}
        with _in_place(step.again(marked=marked, rows=rows, examples=max(rows))):
            program = _forms().LossProgram(run, given, weights=(0,))
            forms = _read(functools.partial(_forms().forms_of_marked, program, rows))
        if forms is not None:
            break
    for name, line in marked.items():
        form = (forms or {}).get(name) or (SUM if name.startswith(_ROWS) else None)  # none, if it only runs eagerly
        step.decided[name, step.trains, _NO_CALLS] = _decide(step, form, name, line)


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
    """The first steps note how losses are computed, if these do not tell it themselves: on PyTorch."""
    noted = ("noted steps", step.trains)
    first = _FIRST_STEPS if "train_step" in step.own_methods else 1
    if keras.backend.backend() != "torch" or step.decided.get(noted, 0) >= first:
        yield
        return
    with _forms().noted(step.rows):
        yield
    step.decided[noted] = step.decided.get(noted, 0) + (not _is_unsure(step.rows))


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
    is_scalar = len(getattr(values, "shape", ())) == 0 and mask is None
    if step is not None and "call" in step.own_methods and not is_scalar:
        values = _checked_rows(step, values)
    reduced = functools.partial(own, values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if step is None:
        return reduced()
    if is_scalar and weighted:
        return _weighted_number(step, own(values, reduction=reduction, dtype=dtype), sample_weight, reduction)
    divisor = None  # unless it is the number of values in the rows of the batch
    if reduction == "mean_with_sample_weight" and weighted:
        given = None if sample_weight is None else keras.ops.copy(sample_weight)  # Keras multiplies torch's in place
        divisor = keras.ops.sum(apply_mask(given, mask, keras.backend.floatx(), reduction))
    elif reduction in ("mean", "sum_over_batch_size", "mean_with_sample_weight"):
        if mask is not None:
            divisor = keras.ops.sum(keras.ops.cast(mask, "float32"))
        elif step.by_part and not is_scalar:
            divisor = keras.ops.shape(values)[0]
    loss = reduced()
    if divisor is not None:
        loss = keras.ops.sum(loss)  # of no rows, Keras returns no number
        loss = loss * keras.ops.cast(_exchanged(step, keras.ops.cast(divisor, "float32"), _of_divisor), loss.dtype)
    if is_scalar:
        return _of_all_ranks_if_sum(step, loss, _NUMBER)
    if reduction == "sum":
        loss = _added(step, loss)
    return loss if reduction in (None, "none") else mark_known(loss)


def _weighted_number(step: ModelStep, loss: Any, sample_weight: Any, reduction: Any) -> Any:
    """What Keras computes of one number and a weight of each row: the number times the mean, or the sum, of weights."""
    loss = _of_all_ranks_if_sum(step, loss, _NUMBER)
    if reduction != "mean_with_sample_weight":
        reduce, exchange = (keras.ops.sum, _of_sums) if reduction == "sum" else (keras.ops.mean, _of_means)
        weight = reduce(keras.ops.cast(sample_weight, "float32"))
        loss = loss * keras.ops.cast(_exchanged(step, weight, exchange), loss.dtype)
    return mark_known(loss)


def _checked_rows(step: ModelStep, values: Any) -> Any:
    """What the user's loss function has computed of each row; a warning if it has computed that of others, too."""
    name, values = _named(step, values, _ROWS)
    if step.marked is None:
        _is_sum(step, values, name)
    return values


def _reduce_samples(own: Callable[..., Any], values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> Any:
    """``reduce_to_samplewise_values`` of Keras' ``Mean`` and ``Sum``, called as ``own``, for numbers of a batch."""
    values, sample_weight = own(values, sample_weight, reduce_fn, dtype)
    step = step_of_this_thread()
    if step is None or reduce_fn is not keras.ops.mean or sample_weight is not None or len(values.shape) > 0:
        return values, sample_weight
    share = keras.ops.cast(_exchanged(step, values, _share, of_loss=False), values.dtype)
    if "train_step" in step.own_methods:
        is_sum = _read(lambda: _forms().total(values, step.rows)) == SUM
    else:
        name, values = _named(step, values, "the result of a metric function")
        is_sum = step.marked is None and _is_sum(step, values, name)
    return (values if is_sum else values * share), share


def _sum_added(model: Any, own: Callable[..., Any], value: Any) -> Any:
    """Keras' sum of a value of ``add_loss``, called as ``own``: over all ranks' rows, if the value has any."""
    step = step_of_this_thread()
    if step is None:
        return own(model, value)
    return _of_all_ranks_if_sum(step, value, "a value of add_loss", functools.partial(own, model))


def _compute_loss(model: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The model's ``compute_loss``, called as ``own``: over all ranks' rows, if it is a sum, of the user's code."""
    loss, step = own(model, *args, **kwargs), step_of_this_thread()
    if step is None or loss is None or not step.own_methods & {"compute_loss", "__call__"}:
        return loss
    return _of_all_ranks_if_sum(step, loss, "the result of compute_loss")


def _of_all_ranks_if_sum(step: ModelStep, loss: Any, what: str, total: Callable[[Any], Any] = keras.ops.sum) -> Any:
    """The total of what the user's code has computed, over all ranks' rows if it is a sum over this rank's."""
    name, loss = _named(step, loss, what)
    if step.marked is not None:
        return total(loss)
    is_sum, loss = _is_sum(step, loss, name), total(loss)
    return mark_known(_added(step, loss) if is_sum else loss)


def _named(step: ModelStep, value: Any, what: str) -> tuple[str, Any]:
    """A name for what the user's code has computed in this place of a step, and the value, marked if that is tried."""
    name = f"{what} ({next(step.numbers)})"
    if step.marked is not None:
        step.marked[name] = caller()
        value = _forms().mark(value, name)
    return name, value


def _added(step: ModelStep, loss: Any) -> Any:
    """A sum over this rank's rows, such that the weighted mean of the ranks' is the sum over all of them."""
    weighted = loss * keras.ops.cast(_exchanged(step, loss, _of_sum), loss.dtype)
    return weighted if step.weighted else loss + keras.ops.stop_gradient(weighted - loss)


def _factor_of_gradients(target: Any) -> Any:
    """The factor of the gradients of ``target``, of a vector those of its sum; ``None`` for 1."""
    step = step_of_this_thread()
    if step is None or not step.weighs_gradients:
        return None
    if not _is_sum(step, target, "a loss of the training step", by_calls=True) or step.marked is not None:
        return None
    return _exchanged(step, keras.ops.convert_to_tensor(step.examples, "int32"), _of_sum)


def step_of_this_thread() -> ModelStep | None:
    """The step that this thread runs or compiles; ``None`` outside of all steps, and in other threads."""
    return _current if _current is not None and _current.thread == threading.get_ident() else None


def _exchanged(step: ModelStep, value: Any, exchange: _Exchange, *, of_loss: bool = True) -> Any:
    """The number that ranks ``exchange``, on the host, of their examples and ``value``; 1 if only this one steps.
    ``value`` makes it part of the function that computes it; the factor ``of_loss`` may be computed again.
    """

    def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
        examples, own = int(hosts[0]), float(hosts[1].reshape(-1)[0])
        exchanges = step.exchanges()
        factor = exchange(step.process_set.communicator, examples, own) if exchanges else 1.0
        if of_loss:
            _note(step, factor, (lambda each: exchange(each, examples, own)) if exchanges else None)
        return [np.asarray(factor, np.float32)]

    arrays = [keras.ops.convert_to_tensor(step.examples, "int32"), keras.ops.stop_gradient(value)]
    (result,) = keras_arrays().host_call(on_host, arrays, [_SCALAR])
    return result


def _share(communicator: Communicator, examples: int, _: float) -> float:
    return examples / sum(communicator.agree(_SHARE, value=examples))


def _of_sum(communicator: Communicator, examples: int, _: float) -> float:
    share = _share(communicator, examples, _)
    return 1 / share if share else 0.0


def _of_divisor(communicator: Communicator, examples: int, divisor: float) -> float:
    own = divisor if examples else 0.0
    total, everywhere = _totals(communicator, examples, own)
    return own / total * everywhere / examples if own else 0.0


def _of_sums(communicator: Communicator, examples: int, own: float) -> float:
    return _totals(communicator, examples, own if examples else 0.0)[0]


def _of_means(communicator: Communicator, examples: int, own: float) -> float:
    total, everywhere = _totals(communicator, examples, own * examples)
    return total / everywhere


def _totals(communicator: Communicator, examples: int, number: float) -> tuple[float, int]:
    """The sums over the ranks of a number and of their examples."""

    def collective() -> tuple[float, int]:
        total = np.array([number])
        everywhere = sum(communicator.agree(_DIVISOR, value=examples))
        communicator.reduce_in_place(total, Reduction.SUM)
        return float(total[0]), everywhere

    return communicator.atomic(collective)


def _note(step: ModelStep, factor: float, exchange: Callable[[Communicator], float] | None) -> None:
    """Notes a loss that was weighted by ``factor``, which ``exchange`` computes again, if others step, too."""
    communicator, noted = step.process_set.communicator, step.noted
    if noted and (noted[-1] is None or len(noted) >= _MANY):
        noted.clear()  # of when the step ran before
    if step.trains and exchange is not None and communicator.elastic:
        noted.append((communicator.launched, factor, exchange))


def correction(step: ModelStep | None = None) -> float:
    """The factor of gradients in ``step``, or the current one, if a loss was weighted there for ranks of which some
    were lost since; all ranks call it. A gradient does not tell losses apart: factors are averaged.
    """
    step = step or _current
    if step is None or not step.noted:
        return 1.0
    communicator, losses = step.process_set.communicator, [each for each in step.noted if each is not None]
    step.noted[:] = [*losses, None]
    ratios = []
    for launched, factor, exchange in losses:
        if communicator.launched != launched:
            new = exchange(communicator)
            ratios.append(new / factor if factor else 1.0)
    return sum(ratios) / len(ratios) if ratios else 1.0


# the user's own losses --------------------------------------------------------------------------

_UNKNOWN = "choros cannot know whether it is a sum over the rows of the batch or a mean"
_OTHER = (
    "it is a product, a ratio or another function of sums over the rows of the batch, and each rank has its own rows"
)
_HOW = (
    "so that it counts as a mean over them. Compute it by means over the rows, or by sums over them, or by a loss of "
    "Keras' with a reduction, or a metric by a keras.metrics.Metric that adds what it needs; see Losses in "
    "docs/training.md."
)
_UNSEEN = (
    "choros has not seen how the gradients of this training step were computed, and counts them as those of a mean "
    "over the rows of the batch: those of a sum would be wrong. Let the step itself call jax.grad, jax.value_and_grad "
    "or, of one number, jax.vjp, by this name; see Losses in docs/training.md."
)


def _is_sum(step: ModelStep, loss: Any, what: str, *, by_calls: bool = False) -> bool:
    """Whether a user's ``loss`` is a sum over the rows; if neither sum nor mean: a warning. No ``rows``: for any."""
    key = (what, step.trains, _calls(step) if by_calls else _NO_CALLS)
    if key in step.decided:
        return bool(step.decided[key])
    with _in_place(step.again(marked=None if step.marked is None else {})):  # a program is traced once more
        form = _read(lambda: _forms().total(loss, step.rows))
    if form is None and _is_of_rows(getattr(loss, "shape", ()), step.rows):
        form = SUM
    is_sum = _decide(step, form, what, _forms().line_of(loss) or caller())
    if form not in (CONSTANT, MEAN, SUM) or not _is_unsure(step.rows):
        step.decided[key] = is_sum
    return is_sum


def _decide(step: ModelStep, form: Form | None, what: str, line: str | None) -> bool:
    """Whether a loss of this form is a sum over the rows; if it is neither that nor a mean, a warning says so."""
    if step.trains and form not in (CONSTANT, MEAN, SUM):
        is_other = form is not None and form.kind is Dependence.OTHER
        _warn(step, f"{what}: {_OTHER if is_other else _UNKNOWN}, {_HOW}", line)
    return form == SUM


def warn_of_unseen(step: ModelStep) -> None:
    """Warns once if a training step of the user's own reduces gradients, and choros has seen no loss of theirs."""
    is_seen = step.calls or step.marked is not None or _UNSEEN in step.decided or keras.backend.backend() != "jax"
    if step.weighs_gradients and not is_seen:
        step.decided[_UNSEEN] = True
        _warn(step, _UNSEEN, caller())


def _warn(step: ModelStep, text: str, line: str | None) -> None:
    if step.process_set.rank() == 0:
        file, _, number = (line or ":1").rpartition(":")
        warnings.warn_explicit(text, UserWarning, file or "<choros>", int(number))


def _is_unsure(rows: frozenset[int]) -> bool:
    """Whether this rank has one row, whose number cannot be distinguished from others, or none."""
    return bool(rows) and max(rows) <= 1


def mark_known(loss: Any) -> Any:
    """Returns ``loss``, with the note that it is one of all ranks, whatever it is computed from."""
    return _forms().mark_known(loss)


def _is_of_rows(shape: Any, rows: frozenset[int]) -> bool:
    """Whether an array of this shape has a number for each row."""
    if getattr(shape, "rank", 0) is None:  # of TensorFlow
        return True
    return len(shape) > 0 and (shape[0] is None or shape[0] in rows)


def _read(read: Callable[[], Any]) -> Any:
    """What is read; ``None`` if a program does what is not expected, or runs only eagerly: training goes on."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - of operations of any library, and of the user's code that is traced
        return None


def _forms() -> Any:
    return importlib.import_module(f"choros.training.{keras.backend.backend()}_forms")


def _calls(step: ModelStep) -> tuple[int, int]:
    """A number for the calls, since the step began, that have led here, and how often they have in this step."""
    frame: FrameType | None = sys._getframe(1)
    calls = []
    while frame is not None and frame.f_globals.get("__name__") not in _CALLERS:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    number = hash(tuple(calls))
    step.calls[number] += 1
    return number, step.calls[number]
