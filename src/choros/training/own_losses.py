"""Losses that the user's code computes, as one number: sums over a rank's rows, means, or neither.

What cannot be known, or is neither, counts as a mean over the rows, and the user is told, once.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import keras

from choros.comm import ProcessSet
from choros.comm.request import caller
from choros.training.forms import CONSTANT, MEAN, SUM, Dependence, form_of

__all__ = ["is_readable", "is_sum", "is_surely_sum", "mark_known", "program"]

_UNKNOWN = "choros cannot know whether it is a sum over the rows of the batch or a mean"
_OTHER = (
    "it is a product, a ratio or another function of sums over the rows of the batch, and each rank has its own rows"
)
_HOW = (
    "so that it counts as a mean over them. Compute it by means over the rows, or by sums over them, or by a loss of "
    "Keras' with a reduction; see Losses in docs/training.md."
)


def is_sum(
    loss: Any, what: str, rows: int, decided: dict[Any, bool], process_set: ProcessSet, *, by_calls: bool, warns: bool
) -> bool:
    """Whether ``loss`` is a sum over the rows; if it is neither that nor a mean over them, a warning says so.

    Args:
        loss: a number that the user's code has computed in a step.
        what: a name of it.
        rows: the number of rows of the batch; 0 if the step is compiled for any.
        decided: what was found in the steps before.
        process_set: the ranks that train together, of which the first one warns.
        by_calls: whether several have this name, which differ by the calls that lead to them.
        warns: whether it warns.
    """
    key = (what, _calls() if by_calls else 0)
    if key in decided:
        return decided[key]
    form = form_of(loss, _forms().reader(rows))
    known = form in (CONSTANT, MEAN, SUM)
    summed = form == SUM
    if rows != 1 or not known:
        decided[key] = summed
    if warns and not known and process_set.rank() == 0:
        _warn(loss, what, unknown=form is None or form.kind is not Dependence.OTHER)
    return summed


def program(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What ``is_sum`` reads on JAX, of which values cannot be asked how they were computed; ``None`` elsewhere.

    Args:
        function: returns the loss.
        arguments: its arguments, arrays.
        named: its named ones, arrays and others.
    """
    if keras.backend.backend() != "jax":
        return None
    from choros.training.jax_forms import LossProgram

    arrays = {name: each for name, each in named.items() if not isinstance(each, bool)}
    others = {name: each for name, each in named.items() if name not in arrays}
    return LossProgram(
        lambda given, named: function(*given, **named, **others), (tuple(arguments), arrays), closes_over_batch=False
    )


def is_readable(loss: Any) -> bool:
    """Whether ``loss`` tells how it was computed."""
    return bool(_forms().is_readable(loss))


def is_surely_sum(loss: Any, rows: int) -> bool:
    """Whether ``loss`` tells that it is a sum over the rows."""
    return is_readable(loss) and form_of(loss, _forms().reader(rows)) == SUM


def mark_known(loss: Any) -> Any:
    """Returns ``loss``, with the note that it is one of all ranks, whatever it is computed from."""
    return _forms().mark_known(loss)


def _forms() -> Any:
    return importlib.import_module(f"choros.training.{keras.backend.backend()}_forms")


def _calls() -> int:
    """A number for the calls, since the step began, that have led here."""
    frame: FrameType | None = sys._getframe(2)
    calls = []
    while frame is not None and frame.f_globals.get("__name__") != "choros.training.trainer":
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(calls))


def _warn(loss: Any, what: str, *, unknown: bool) -> None:
    file, _, line = (_forms().line_of(loss) or caller() or ":1").rpartition(":")
    text = f"{what}: {_UNKNOWN if unknown else _OTHER}, {_HOW}"
    warnings.warn_explicit(text, UserWarning, file or "<choros>", int(line))
