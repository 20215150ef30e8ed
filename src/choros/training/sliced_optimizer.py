"""Optimizers of which each rank has a slice of the state, and makes the update of the variables' items in it, as
``parallel/reduce/slices.py`` shows: by Keras' own code, on slice variables. To clip by norms, ranks sum one number for
each variable before.

Files have the state of one process, which a rank alone may write: ``whole_state.py``.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from choros.comm import Array, Reduction
from choros.errors import ConfigError
from choros.parallel.ops import allreduce
from choros.training.keras_internals import slice_variables
from choros.training.keras_internals.models import (
    derive,
    innermost,
    note_trained_variables,
    own_variables,
    update_if_finite,
)
from choros.training.keras_internals.slice_variables import Outline, outline_of
from choros.training.sliced_state import Slices
from choros.training.thread import thread
from choros.training.variables import OF_SLICE, value_of
from choros.training.whole_state import WholeState, host_value

_ATTRIBUTE = "_choros_state"


class _Sliced:
    """What the class of an optimizer overrides that is built with slice variables."""

    def build(self: Any, variables: Any) -> None:
        """Builds the optimizer for this rank's slice variables."""
        slices = slices_of(self)
        with slice_variables.building(inside=slices.is_inside):
            super().build(variables)  # type: ignore[misc]
        for (index, _), own in slices.own.items():
            if own is not slices.variables[index]:
                slice_variables.decays_as(self, own, slices.variables[index])
        state = state_of(self)
        for variable in state.of_slices:
            object.__setattr__(variable, OF_SLICE, state)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        slices_of(self).clipped = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Clips by the norms of whole gradients."""
        optimizer: Any = self
        slices = slices_of(self)
        if not (optimizer.clipnorm or optimizer.global_clipnorm):
            return super()._clip_gradients(grads)  # type: ignore[misc]
        squares = slices.squares(grads)
        if optimizer.clipnorm:
            factors = optimizer.clipnorm / keras.ops.maximum(keras.ops.sqrt(squares), optimizer.clipnorm)
            return slices.scaled(grads, factors)
        norm, limit = keras.ops.sqrt(keras.ops.sum(squares)), optimizer.global_clipnorm
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # NaN for infinities, as in Keras
        # Rows become dense, as there.
        return [each if each is None else each * keras.ops.cast(scale, each.dtype) for each in grads]

    def finalize_variable_values(self, var_list: Any) -> None:
        """Keras', for moving averages of which each rank has its slices."""
        del var_list
        if self.use_ema:  # type: ignore[attr-defined]
            with _loaded(self):
                super().finalize_variable_values(slices_of(self).slice_variables)  # type: ignore[misc]

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        if save_type == "checkpoint":
            raise ConfigError(
                "tf.train.Checkpoint would write the slices of one rank, which no other number of ranks can read: save "
                "with model.save() or model.save_weights(), or leave shard_state out."
            )
        return super()._trackable_children(save_type, **options)  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        """Writes what one process would write, gathered from the ranks one variable at a time; on any ranks."""
        for number, value in enumerate(whole_values(self)):
            store[str(number)] = value

    def load_own_variables(self: Any, store: Any) -> None:
        """Reads this rank's slices of what any number of ranks have saved."""
        expected, given = len(whole_outlines(self)), len(store.keys())
        if expected != given:
            warnings.warn(
                f"the state of the optimizer {self.name!r} was not loaded: it has {expected} variables, and the file "
                f"{given}. Was it saved with another optimizer, or before the first step?",
                stacklevel=2,
            )
            return
        values: Iterator[Any] = (store[str(number)] for number in range(expected))
        if thread.loading_alone:
            whole = [np.asarray(each) for each in values]
            state_of(self).held, values = whole[len(_outer_variables(self)) :], iter(whole)
        assign_whole(self, values)


class _SlicedLossScale:
    """What the class of a ``LossScaleOptimizer`` around such an optimizer overrides."""

    save_own_variables, load_own_variables = _Sliced.save_own_variables, _Sliced.load_own_variables

    def check_finite(self, grads: Any) -> Any:
        """Whether the gradients of all ranks' slices are finite."""
        finite = keras.ops.cast(super().check_finite(grads), "float32")  # type: ignore[misc]
        return allreduce(finite, Reduction.MIN, process_set=slices_of(self).process_set) > 0


def apply_scaled(optimizer: Any, gradients: Sequence[Any], own: Sequence[Any]) -> None:
    """``apply`` of a ``LossScaleOptimizer`` on JAX, whose own works nowhere, with gradients of some slice variables."""
    given = dict(zip(map(id, own), gradients, strict=True))
    parts = slices_of(optimizer).slice_variables
    every = [given.get(id(part)) for part in parts]
    finite = optimizer.check_finite(every)
    assigned = [*parts, *optimizer.variables]
    values, state = ([value_of(variable) for variable in each] for each in (parts, optimizer.variables))
    updated = update_if_finite(optimizer, finite, state, every, values)
    for variable, value in zip(assigned, [each for part in updated for each in part], strict=True):
        variable.assign(value)


@contextmanager
def _loaded(optimizer: Any) -> Iterator[None]:
    """A context that assigns slice variables, on all ranks, and weights are gathered from them."""
    if not has_slices(optimizer):
        yield
        return
    slices = slices_of(optimizer)
    slices.load()
    yield
    slices.gather(state_of(optimizer).check_start, everything=True)


slice_variables.exchange_averages_in(_loaded)


def whole_values(optimizer: Any) -> Iterator[Array]:
    """Yields the state that one process would have, one variable at a time; a call on this rank suffices."""
    if not has_slices(optimizer):
        yield from map(host_value, optimizer.variables)
        return
    state = state_of(optimizer)
    yield from map(host_value, _outer_variables(optimizer))
    for number in range(len(state.slots)):
        yield state.whole(number)


def whole_outlines(optimizer: Any) -> list[Outline]:
    """Returns what ``whole_values`` will be."""
    if not has_slices(optimizer):
        return list(map(outline_of, optimizer.variables))
    own = list(map(outline_of, _outer_variables(optimizer)))
    return own + [slot.outline for slot in state_of(optimizer).slots]


def assign_whole(optimizer: Any, values: Iterable[Array]) -> None:
    """Gives this rank its part of a state that one process, or any number of ranks, had."""
    own = _outer_variables(optimizer) if has_slices(optimizer) else list(optimizer.variables)
    for number, value in enumerate(values, -len(own)):
        if number < 0:
            own[number].assign(value)
        else:
            state_of(optimizer).assign(number, value)


def undivided(optimizer: Any) -> list[Any]:
    """The variables of an optimizer's state that each rank has whole."""
    return _outer_variables(optimizer) + state_of(optimizer).undivided


def has_slices(optimizer: Any) -> bool:
    """Whether ranks have slices of the optimizer's state."""
    return hasattr(innermost(optimizer), _ATTRIBUTE)


def _outer_variables(optimizer: Any) -> list[Any]:
    return [] if innermost(optimizer) is optimizer else own_variables(optimizer)


def slices_of(optimizer: Any) -> Slices:
    """The slices of an optimizer that has some, or of the one inside it."""
    return state_of(optimizer).slices


def state_of(optimizer: Any) -> WholeState:
    """The state that one process would have, of an optimizer of which this rank has slices."""
    state: WholeState = getattr(innermost(optimizer), _ATTRIBUTE)
    return state


def slice_state(optimizer: Any, state: WholeState) -> None:
    """Makes an optimizer one that is to be built with slice variables; ``derive`` it again around its new class."""
    inner = innermost(optimizer)
    inner.__class__ = derive(type(inner), _Sliced)
    object.__setattr__(inner, _ATTRIBUTE, state)
    state.serve()
    if inner is not optimizer:
        optimizer.__class__ = derive(type(optimizer), _SlicedLossScale)


def rebuild(optimizer: Any, state: WholeState) -> None:
    """Builds an optimizer anew, for a state in other slices; what is in them is as Keras begins it."""
    inner, variables = innermost(optimizer), state.slices.slice_variables
    slices_of(optimizer).is_replaced = True
    object.__setattr__(inner, _ATTRIBUTE, state)
    state.serve()
    slice_variables.unbuild(inner, state.first)
    _Sliced.build(inner, variables)
    if inner is not optimizer:
        note_trained_variables(optimizer, variables)
