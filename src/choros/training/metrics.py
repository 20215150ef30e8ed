"""Metrics over the examples of all ranks: how the ranks' states become that of one process that has seen all.

Keras' own metrics only add to their variables. A metric of the user's may also keep a maximum or a minimum, and nothing
declares that. So ``rules_of`` tries it, once, from two states and on an invented batch of the shapes it was given::

    reset ── update(a) ──► s      a sum:       update(s, b) - s == update(reset, b) - reset
      └───── update(b) ──► t      a maximum:   update(s, b) == max(s, t)
    s ────── update(b) ──► ?      a minimum:   update(s, b) == min(s, t)
"""

import functools
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array, Reduction, global_process_set
from choros.parallel.objects import allgather_object
from choros.parallel.ops import broadcast_arrays
from choros.training.keras_internals.models import overrides, single_metrics

_ROWS, _TRIALS = 3, 3
#: How the ranks' values of a variable are merged; ``None``: they are those of rank 0.
Rule = Reduction | None
Logs = Mapping[str, Any]
#: A rule, and the value that the variable begins with on each rank.
Start = tuple[Rule, Any]
#: A rank's examples, what it has logged (``None``: no number), and the names of the metrics that are equal to numbers.
_Logged = tuple[float, dict[str, Any], dict[str, list[str]]]

_DECLARED = {"sum": Reduction.SUM, "mean": Reduction.AVERAGE}
#: For metrics of the user's: the arguments of an update, as arrays of zeros, and the rules once they are known.
_arguments: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_rules: weakref.WeakKeyDictionary[Any, list[Start]] = weakref.WeakKeyDictionary()
#: With how many admissions of new ranks, which do not know them, the ranks have agreed on the rules.
_agreed_with: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def global_metrics(model: Any, *, counted: bool = False) -> dict[str, Any]:
    """The metrics as if one process had seen all rows: sums are reduced before a ratio is read; the model's stay."""
    with merged_metrics(() if counted else model.metrics):
        results = keras.tree.map_structure(_on_host, model.get_metrics_result())
    arrays = keras.tree.flatten(results)
    # The same sums may differ in the last bit between ranks, and ranks must make identical decisions.
    values = np.concatenate([np.zeros(0), *(array.reshape(-1) for array in arrays)])
    (values,) = broadcast_arrays([values], 0, names=["metric results"])
    parts = np.split(values, np.cumsum([array.size for array in arrays]))
    same = [
        part.reshape(array.shape) if array.ndim else float(part[0]) for part, array in zip(parts, arrays, strict=False)
    ]
    packed: dict[str, Any] = keras.tree.pack_sequence_as(results, same)
    return packed


def global_results(model: Any, *, counted: bool = False) -> dict[str, float]:
    """Returns ``global_metrics`` by the names under which ``fit`` logs them."""
    return flat_results(global_metrics(model, counted=counted))


def flat_results(results: dict[str, Any]) -> dict[str, float]:
    """Returns the results of metrics, some of which may be dicts of results, in one dict."""
    flat: dict[str, float] = {}
    for name, value in results.items():
        flat.update(flat_results(value) if isinstance(value, dict) else {name: value})
    return flat


@contextmanager
def merged_metrics(metrics: Sequence[Any]) -> Iterator[None]:
    """A context in which ``metrics`` have the states of one process that has seen all ranks' examples."""
    variables, own, everywhere = _merged(metrics)
    try:
        for variable, value in zip(variables, everywhere, strict=True):
            variable.assign(value)
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def as_logged(results: Logs, names: Collection[str]) -> dict[str, Any]:
    """The ``results`` of metrics without those that are none of what Keras logs by these ``names``: it logs what the
    user's step returns unless these are the names of all metrics, whose results are 0 if the step did not update them.
    """
    is_of_step = bool(names) and set(names) != set(results)
    return {name: value for name, value in results.items() if not is_of_step or (name in names and np.any(value))}


def own_results(model: Any) -> dict[str, Any]:
    """The results of the model's metrics, by the names under which ``fit`` logs them, of this rank's rows."""
    return flat_results(keras.tree.map_structure(_on_host, type(model).get_metrics_result(model)))


def shared_logs(logs: Logs, examples: float, own: Logs, results: Logs) -> dict[str, float]:
    """What ranks have logged by names of no metric: the mean, weighted by their ``examples``. A number that is a
    metric's ``own`` result of this rank, which a step has returned by another name, becomes that of all ``results``.
    """
    return _shared(_logged(logs, examples, own), results)


def logs_of_step(model: Any, logs: Logs, examples: float, results: Logs) -> dict[str, Any]:
    """What a step of the user's has logged, of all ranks: the ``results`` of metrics, and ``shared_logs`` besides."""
    logged = _logged(logs, examples, own_results(model))
    return _shared(logged, results) | as_logged(results, {name for _, numbers, _ in logged for name in numbers})


def _logged(logs: Logs, examples: float, own: Logs) -> list[_Logged]:
    """What each rank with examples has logged; ``own``: the results of its metrics."""
    numbers = {
        name: float(value) if np.ndim(value) == 0 and not isinstance(value, str) else None
        for name, value in logs.items()
    }
    equal = {
        name: [metric for metric, each in own.items() if np.ndim(each) == 0 and np.isclose(value, each, 1e-6, 0.0)]
        for name, value in numbers.items()
        if value is not None
    }
    return [each for each in allgather_object((examples, numbers, equal), name="logs") if each[0]]


def _shared(logged: Sequence[_Logged], results: Logs) -> dict[str, float]:
    shared: dict[str, float] = {}
    for name in dict.fromkeys(name for _, _, equal in logged for name in equal):
        having = [each for each in logged if name in each[2]]
        metric = next((each for each in having[0][2][name] if each in results), None)
        total = sum(weight for weight, _, _ in having)
        mean = sum(weight * numbers[name] for weight, numbers, _ in having) / total
        shared[name] = mean if metric is None else float(results[metric])
    return shared


def count_examples(model: Any) -> int:
    """The number of examples that the model's metrics have seen on this rank; 0 if it has no loss metric."""
    loss = next((metric for metric in model.metrics if metric.name == "loss" and hasattr(metric, "count")), None)
    return 0 if loss is None else round(float(loss.count.numpy()))


def _on_host(result: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(result), np.float64)


def watch(metric: Any) -> None:
    """Makes ``metric`` note the shapes that it is updated with, unless Keras updates it: its variables are sums."""
    if not overrides(metric, "update_state") or "update_state" in vars(metric):
        return
    own = metric.update_state

    @functools.wraps(own)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        if metric not in _arguments:
            _arguments[metric] = keras.tree.map_structure(_zeros_like, (args, kwargs))
        return own(*args, **kwargs)

    # Bypasses Keras' attribute tracking: the function is not part of the metric.
    object.__setattr__(metric, "update_state", update_state)


def _merged(metrics: Sequence[Any]) -> tuple[list[Any], list[Array], list[Array]]:
    """Returns the metrics' variables, this rank's values, and the values that one process would have."""
    metrics = single_metrics(metrics)
    starts = _rules_of(metrics)
    rules = [rule for rule, _ in starts]
    variables = [variable for metric in metrics for variable in metric.variables]
    own = [np.array(adapter_of(variable.value).to_host(variable.value)) for variable in variables]
    values = list(own)
    communicator = global_process_set.communicator
    for rule in dict.fromkeys(rules):
        chosen = [index for index, each in enumerate(rules) if each is rule]
        arrays = [own[index] for index in chosen]
        if rule is None:
            reduced = broadcast_arrays(arrays, 0, names=["metrics"] * len(chosen))
        else:
            reduced = communicator.grouped_allreduce(arrays, rule, name="metrics")
        for index, value in zip(chosen, reduced, strict=True):
            others = (communicator.size - 1) * starts[index][1] if rule is Reduction.SUM else 0
            values[index] = value - others if np.any(others) else value
    return variables, own, values


def _rules_of(metrics: Sequence[Any]) -> list[Start]:
    admissions = global_process_set.admissions
    unknown = [each for each in metrics if overrides(each, "update_state") and _agreed_with.get(each) != admissions]
    if unknown:
        # A rank that has had no batches yet cannot try, and all ranks must merge identically.
        known = [_rules.get(metric) or _try(metric) for metric in unknown]
        tried = allgather_object(known, name="rules of metrics")
        for metric, *found in zip(unknown, *tried, strict=True):
            rules = next((rules for rules in found if rules is not None), None)
            if rules is not None:
                _rules[metric] = rules
                if len(tried) == global_process_set.communicator.size:  # else others, which have joined, lack them
                    _agreed_with[metric] = admissions
    return [rule for metric in metrics for rule in _rules.get(metric) or _declared(metric)]


def _declared(metric: Any) -> list[Start]:
    return [(_DECLARED.get(variable.aggregation), 0) for variable in metric.variables]


def _try(metric: Any) -> list[Start] | None:
    """Returns the rules of the variables of a metric of the user's; ``None`` if it has not been updated yet."""
    if metric not in _arguments:
        return None
    if not metric.variables:
        warnings.warn(
            f"the metric {metric.name!r} has no variables, which add_weight() creates: its result is that of rank 0's "
            "rows.",
            stacklevel=2,
        )
        return []
    generator = np.random.default_rng(0)
    declared = _declared(metric)
    any_of_three: list[Rule] = [Reduction.SUM, Reduction.MAX, Reduction.MIN]
    undeclared = [variable.aggregation == "none" for variable in metric.variables]  # of keras.Variable, not add_weight
    candidates = [
        any_of_three if rule is Reduction.SUM or unknown else [rule]
        for (rule, _), unknown in zip(declared, undeclared, strict=True)
    ]
    try:
        reset = _hosts(metric.stateless_reset_state())
        for scale in np.arange(_TRIALS) * 3.0:
            a, b = (_invented(_arguments[metric], generator, scale) for _ in range(2))
            s, t = _updated(metric, reset, a), _updated(metric, reset, b)
            both = _updated(metric, s, b)
            for index, rules in enumerate(candidates):
                states = reset[index], s[index], t[index], both[index]
                candidates[index] = [rule for rule in rules if len(rules) == 1 or _holds(rule, *states)]
        merged = all(rules and rules[0] in any_of_three for rules in candidates)
        weighs_batches = merged and _weighs_batches(metric, reset, a, b)
    except Exception as error:  # noqa: BLE001  (the user's code, on data it was not written for)
        warnings.warn(
            f"the metric {metric.name!r} cannot be tried on invented data ({error}): its state is summed over the "
            "ranks, which is wrong for a maximum or a minimum.",
            stacklevel=2,
        )
        return declared
    for index, rules in enumerate(candidates):
        if not rules:
            warnings.warn(
                f"{metric.variables[index].name!r} of the metric {metric.name!r} is neither a sum nor a maximum nor a "
                "minimum over batches: its value on all ranks is that of rank 0.",
                stacklevel=2,
            )
    if weighs_batches:
        warnings.warn(
            f"the metric {metric.name!r} gives each batch a weight of its own, whatever its number of rows: the rows "
            "of each rank count as a batch. Let update_state() add sums over rows, and result() divide them.",
            stacklevel=2,
        )
    return [(rules[0] if rules else None, start) for rules, start in zip(candidates, reset, strict=True)]


def _holds(rule: Any, reset: Array, s: Array, t: Array, both: Array) -> bool:
    with np.errstate(invalid="ignore"):
        expected = {Reduction.SUM: s + (t - reset), Reduction.MAX: np.maximum(s, t), Reduction.MIN: np.minimum(s, t)}
    return bool(np.allclose(both, expected[rule], rtol=1e-4, atol=1e-5))


def _weighs_batches(metric: Any, reset: Sequence[Array], a: Any, b: Any) -> bool:
    """Whether other batches of the same rows have another result. What is given one number for a batch weighs them."""
    if not all(np.ndim(leaf) for leaf in keras.tree.flatten(a) if keras.ops.is_tensor(leaf)):
        return False
    larger = _joined(a, b)
    states = _updated(metric, _updated(metric, reset, b), larger), _updated(metric, reset, _joined(b, larger))
    results = [metric.stateless_result(list(map(keras.ops.convert_to_tensor, state))) for state in states]
    first, second = (list(map(_on_host, keras.tree.flatten(each))) for each in results)
    return not all(np.allclose(*each, rtol=1e-3, atol=1e-5, equal_nan=True) for each in zip(first, second, strict=True))


def _joined(*batches: Any) -> Any:
    """The rows of ``batches`` in one."""

    def join(*leaves: Any) -> Any:
        return keras.ops.concatenate(leaves) if keras.ops.is_tensor(leaves[0]) else leaves[0]

    return keras.tree.map_structure(join, *batches)


def _updated(metric: Any, state: Sequence[Array], arguments: Any) -> list[Array]:
    args, kwargs = arguments
    return _hosts(metric.stateless_update_state(list(map(keras.ops.convert_to_tensor, state)), *args, **kwargs))


def _hosts(values: Sequence[Any]) -> list[Array]:
    return [np.array(keras.ops.convert_to_numpy(value)) for value in values]


def _zeros_like(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    if shape is None:
        return value
    dtype = str(keras.backend.standardize_dtype(value.dtype))
    return np.zeros([_ROWS, *(size or _ROWS for size in tuple(shape)[1:])][: len(shape)], dtype)


def _invented(zeros: Any, generator: np.random.Generator, scale: float) -> Any:
    """Replaces arrays of zeros: labels are 0 or 1; other numbers are first in 0 … 1, then of any sign."""

    def invent(zero: Any) -> Any:
        if not isinstance(zero, np.ndarray):
            return zero
        values: Array = np.asarray(generator.integers(0, 2, zero.shape))
        if zero.dtype.kind not in "iub":
            values = np.asarray(generator.normal(size=zero.shape) * scale if scale else generator.random(zero.shape))
        return keras.ops.convert_to_tensor(values.astype(zero.dtype))

    return keras.tree.map_structure(invent, zeros)
