"""Losses that the user's code computes, as one number: sums over a rank's rows, means, or neither.

What cannot be known, or is neither, counts as a mean over the rows, with one warning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import keras

from choros.comm import ProcessSet
from choros.comm.request import caller
from choros.training.forms import CONSTANT, MEAN, SUM, Dependence, Form

__all__ = [
    "decide",
    "forms_of_marked",
    "is_sum",
    "is_surely_sum",
    "is_unsure",
    "mark",
    "mark_known",
    "noted",
    "reads_programs",
]

_KNOWN = (CONSTANT, MEAN, SUM)

_UNKNOWN = "choros cannot know whether it is a sum over the rows of the batch or a mean"
_OTHER = (
    "it is a product, a ratio or another function of sums over the rows of the batch, and each rank has its own rows"
)
_HOW = (
    "so that it counts as a mean over them. Compute it by means over the rows, or by sums over them, or by a loss of "
    "Keras' with a reduction; see Losses in docs/training.md."
)


def is_sum(
    loss: Any,
    what: str,
    rows: frozenset[int],
    decided: dict[Any, int],
    process_set: ProcessSet,
    *,
    by_calls: bool,
    warns: bool,
) -> bool:
    """Whether ``loss`` is a sum over the rows; if it is neither that nor a mean over them, a warning says so.

    Args:
        loss: a number that the user's code has computed in a step, or several, which are added up.
        what: a name of it.
        rows: the numbers of rows of the batch's arrays; empty if the step is compiled for any.
        decided: what was found in the steps before.
        process_set: the ranks that train together, of which the first one warns.
        by_calls: whether several have this name, which differ by the calls that lead to them.
        warns: whether it warns.
    """
    key = (what, warns, _calls() if by_calls else 0)
    if key in decided:
        return bool(decided[key])
    form = _read(lambda: _forms().total(loss, rows))
    if form is None and _is_of_rows(getattr(loss, "shape", ()), rows):
        form = SUM
    is_sum = decide(form, what, _forms().line_of(loss) or caller(), process_set, warns=warns)
    if form not in _KNOWN or not is_unsure(rows):
        decided[key] = is_sum
    return is_sum


def decide(form: Form | None, what: str, line: str | None, process_set: ProcessSet, *, warns: bool) -> bool:
    """Whether a loss of this form is a sum over the rows; if it is neither that nor a mean, a warning says so."""
    if warns and form not in _KNOWN and process_set.rank() == 0:
        _warn(what, line, unknown=form is None or form.kind is not Dependence.OTHER)
    return form == SUM


def is_unsure(rows: frozenset[int]) -> bool:
    """Whether this rank has one row, whose number cannot be distinguished from others, or none."""
    return bool(rows) and max(rows) <= 1


def reads_programs() -> bool:
    """Whether losses are read from the program of a whole step, as a value of JAX does not know how it was computed."""
    return bool(keras.backend.backend() == "jax")


def forms_of_marked(
    function: Callable[..., Any], arguments: tuple[Any, ...], rows: frozenset[int]
) -> dict[str, Form | None]:
    """The forms of the values that a step on JAX marks; none of a step that only runs eagerly."""
    program = _forms().LossProgram(function, arguments, weights=(0,))
    return _read(lambda: _forms().forms_of_marked(program, rows)) or {}


def mark(loss: Any, name: str) -> Any:
    """Returns ``loss``, marked for ``forms_of_marked``."""
    return _forms().mark(loss, name)


def noted(rows: frozenset[int]) -> AbstractContextManager[None]:
    """A context in which it is noted how losses are computed, if they do not tell that themselves: on PyTorch."""
    if keras.backend.backend() != "torch":
        return nullcontext()
    context: AbstractContextManager[None] = _forms().noted(rows)
    return context


def is_surely_sum(loss: Any, rows: frozenset[int]) -> bool:
    """Whether ``loss`` tells that it is a sum over the rows."""
    return bool(_read(lambda: _forms().total(loss, rows)) == SUM)


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


def _calls() -> int:
    """A number for the calls, since the step began, that have led here."""
    frame: FrameType | None = sys._getframe(2)
    calls = []
    while frame is not None and frame.f_globals.get("__name__") != "choros.training.trainer":
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(calls))


def _warn(what: str, line: str | None, *, unknown: bool) -> None:
    file, _, number = (line or ":1").rpartition(":")
    text = f"{what}: {_UNKNOWN if unknown else _OTHER}, {_HOW}"
    warnings.warn_explicit(text, UserWarning, file or "<choros>", int(number))
