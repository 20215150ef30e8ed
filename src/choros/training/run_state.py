"""Everything of a run of ``fit``, at the end of a step: what commits hold, and what a process that joins receives.

::

    RunState(model, callbacks)          when fit begins
      capture(epoch, position) ──►      weights, optimizers' state, seeds, metrics, random streams, callbacks' state:
                                        NumPy arrays and plain values, for a CommitStore or another process
      restore(state) ◄──                in a process that runs the same script, in fit, before its first step

The state does not depend on the framework.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.elastic.commit_store import is_plain
from choros.errors import ConfigError
from choros.training.distributed_optimizer import reducer_of
from choros.training.first_rank import FirstRankCallback
from choros.training.keras_internals.fit import sync_jax_state
from choros.training.keras_internals.models import (
    build_metrics,
    built_optimizers,
    global_seed_generator,
    local_value,
    seed_generators_of,
)
from choros.training.random_numbers import random_streams, set_random_streams
from choros.training.sliced_optimizer import assign_whole, has_slices, whole_outlines, whole_values

#: What ``fit`` gives callbacks; and what Keras' own set in each process: the sign of ``min_delta``, with a comparison,
#: which is a function; of TensorBoard, what belongs to its writers and to the profiler.
_OF_PROCESS = frozenset(
    [
        *("_model", "params", "_params", "validation_data", "min_delta"),
        *("_writers", "_prev_summary_state", "_is_tracing", "_profiler_started"),
    ]
)


@final
class RunState:
    """Captures and restores a run of ``fit``; a callback's ``state_dict()`` and ``load_state_dict(state)`` decide, or
    its attributes that are plain values. One with the name of a constructor's argument is configuration, and stays as
    the script has set it, unless the training has changed it.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> run = RunState(model, [keras.callbacks.EarlyStopping("loss")])
        >>> state = run.capture(epoch=3, position={"step": 17})
        >>> state["epoch"], state["position"]
        (3, {'step': 17})
        >>> run.restore(state)
    """

    def __init__(self, model: Any, callbacks: Sequence[Any]) -> None:
        self._model = model
        own = [each.callback if isinstance(each, FirstRankCallback) else each for each in callbacks]
        self._callbacks = [each for each in own if type(each).__name__ != "ProgbarLogger"]
        self._configured = [_configuration(each) for each in self._callbacks]

    def capture(self, *, epoch: int, position: Any = None, metrics: bool = True, joins: bool = False) -> dict[str, Any]:
        """Copies this process's state, and asks others for their slices of an optimizer's, if they have any. For a rank
        that ``joins``, no metrics, which would count twice, and no state that is in slices.
        """
        model = self._model
        sync_jax_state(model)
        callbacks = zip(_keys(self._callbacks), self._callbacks, self._configured, strict=True)
        return {
            "epoch": epoch,
            "position": copy.deepcopy(position),
            "weights": _values(model.weights),
            "optimizers": [
                list(whole_values(each)) if _has_state(each) and not (joins and has_slices(each)) else []
                for each in built_optimizers(model)
            ],
            "seeds": _values([each.state for each in seed_generators_of(model)]),
            "global_seed": _values([] if (own := global_seed_generator()) is None else [own.state]),
            "metrics": _values(model.metrics_variables) if metrics and not joins else None,
            "stop_training": bool(model.stop_training),
            "random": random_streams(),
            "callbacks": {key: _captured(callback, configured) for key, callback, configured in callbacks},
        }

    def restore(self, state: dict[str, Any], batch: Any = None) -> None:
        """Continues from a state of the same script, between steps, after all callbacks' ``on_train_begin``, which
        resets them. TensorFlow needs ``batch`` if there are metrics. A ConfigError (another model) has changed nothing.
        """
        model = self._model
        sync_jax_state(model)
        if batch is not None:
            build_metrics(model, lambda: batch)
        optimizers = built_optimizers(model)
        if len(optimizers) != len(state["optimizers"]):
            raise ConfigError(
                f"the state has {len(state['optimizers'])} optimizers, and the model {model.name!r} {len(optimizers)}: "
                "restore it into the same model, compiled in the same way."
            )
        seeds = [each.state for each in seed_generators_of(model)]
        parts = [("weight", model.weights, state["weights"]), ("seed", seeds, state["seeds"])]
        pairs = zip(optimizers, state["optimizers"], strict=True)
        own = [(each, values) for each, values in pairs if _has_state(each) and (values or not has_slices(each))]
        if state["global_seed"]:
            parts.append(("global seed", [global_seed_generator(create=True).state], state["global_seed"]))
        if state["metrics"] is not None:
            parts.append(("metric variable", model.metrics_variables, state["metrics"]))
        for part in parts:
            _check(model, *part)
        for number, (optimizer, values) in enumerate(own, start=1):
            _check(model, f"optimizer {number}, variable", whole_outlines(optimizer), values)
        for _, variables, values in parts:
            for variable, value in zip(variables, values, strict=True):
                current = local_value(variable)
                variable.assign(adapter_of(current).from_host(np.array(value), current))
        for optimizer, values in own:
            assign_whole(optimizer, values)
        model.stop_training = state["stop_training"]
        self.restore_callbacks(state)
        set_random_streams(state["random"])

    def restore_callbacks(self, state: dict[str, Any]) -> None:
        """Restores the callbacks' part of a state alone."""
        for key, callback in zip(_keys(self._callbacks), self._callbacks, strict=True):
            if key in state["callbacks"]:
                _restore(callback, copy.deepcopy(state["callbacks"][key]))


def _has_state(optimizer: Any) -> bool:
    """Whether this rank has an optimizer's state, or a slice of it."""
    reducer = reducer_of(optimizer)
    return reducer is None or reducer.has_state


def _values(variables: Sequence[Any]) -> list[NDArray[Any]]:
    values = [local_value(variable) for variable in variables]
    return [np.array(adapter_of(value).to_host(value)) for value in values]


def _check(model: Any, kind: str, variables: Sequence[Any], values: Sequence[NDArray[Any]]) -> None:
    expected = [(tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)) for variable in variables]
    found = [(value.shape, str(value.dtype)) for value in values]
    if expected != found:
        number = next((n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
        where = (
            f"it has {len(found)} {kind}s, and the model {len(expected)}"
            if number is None
            else f"{kind} {number} is {found[number][1]} of shape {found[number][0]} in it, and "
            f"{expected[number][1]} of shape {expected[number][0]} in the model"
        )
        raise ConfigError(
            f"the state does not match the model {model.name!r}: {where}. Restore it into the same model, compiled in "
            "the same way; on TensorFlow, pass a batch, from which metrics are created."
        )


# callbacks --------------------------------------------------------------------------------------


def _keys(callbacks: Sequence[Any]) -> Iterator[str]:
    """Returns a name for each callback that does not depend on callbacks of other classes, which ranks may not have."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = f"{type(callback).__module__}.{type(callback).__qualname__}"
        yield f"{name} {counts[name]}"
        counts[name] += 1


def _configuration(callback: Any) -> dict[str, Any]:
    classes = [each for each in type(callback).__mro__ if issubclass(each, keras.callbacks.Callback)]
    arguments = {name for each in classes for name in inspect.signature(each).parameters}
    return {name: copy.copy(value) for name, value in vars(callback).items() if name in arguments}


def _captured(callback: Any, configured: dict[str, Any]) -> Any:
    if hasattr(callback, "state_dict"):
        return copy.deepcopy(callback.state_dict())
    attributes = {name: value for name, value in vars(callback).items() if name not in _OF_PROCESS and is_plain(value)}
    return {
        name: copy.deepcopy(value)
        for name, value in attributes.items()
        if name not in configured or not _equal(value, configured[name])
    }


def _restore(callback: Any, state: Any) -> None:
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    try:
        return bool(one == other)
    except ValueError:  # arrays inside
        return False
