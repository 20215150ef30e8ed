"""Metrics over the examples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Reduction, global_process_set

__all__ = ["average_logs", "count_examples", "global_result", "global_results"]


def global_results(model: Any, *, counted: bool = False) -> dict[str, float]:
    """Returns the results of the model's metrics as if one process had seen all ranks' examples.

    A Keras metric keeps sums (of losses, of hits, of weights) and divides when its result is read. The ranks' sums
    are reduced, so ratios such as precision or AUC are correct too. The model's own metric variables do not change.

    Args:
        model: a model with metrics of the same names on every rank.
        counted: whether every rank's metrics have seen all ranks' examples already.

    Returns:
        The results by the names under which ``fit`` logs them; identical on every rank.
    """
    with _summed(() if counted else model.metrics):
        results = _flat(model.get_metrics_result())
    # The same sums may differ in the last bit between ranks, and ranks must make identical decisions.
    values = np.array(list(results.values()), np.float64)
    values = global_process_set.communicator.broadcast(values, 0, name="metric results")
    return dict(zip(results, map(float, values), strict=True))


def global_result(metric: Any, result: Callable[[], Any]) -> Any:
    """Returns the value of ``result()`` while ``metric`` has the sums of all ranks."""
    with _summed([metric]):
        return result()


@contextmanager
def _summed(metrics: Sequence[Any]) -> Iterator[None]:
    """A context in which ``metrics`` have the sums of all ranks."""
    variables = [variable for metric in metrics for variable in metric.variables if variable.aggregation == "sum"]
    own = [np.array(adapter_of(variable.value).to_host(variable.value)) for variable in variables]
    total = global_process_set.communicator.grouped_allreduce(own, Reduction.SUM, name="metrics")
    try:
        _assign(variables, total)
        yield
    finally:
        _assign(variables, own)


def average_logs(logs: dict[str, Any], examples: int) -> dict[str, float]:
    """Returns the mean over the ranks of numbers that are not metrics of the model, weighted by examples.

    Args:
        logs: numbers by name, with the same names on every rank.
        examples: the number of examples that this rank's numbers come from.
    """
    names = sorted(name for name, value in logs.items() if np.ndim(value) == 0 and not isinstance(value, str))
    weighted = np.array([float(logs[name]) * examples for name in names] + [float(examples)])
    total = global_process_set.communicator.allreduce(weighted, Reduction.SUM, name=f"logs {', '.join(names)}")
    return {name: float(value / max(total[-1], 1.0)) for name, value in zip(names, total, strict=False)}


def count_examples(model: Any) -> int:
    """The number of examples that the model's metrics have seen on this rank; 0 if it has no loss metric."""
    loss = next((metric for metric in model.metrics if metric.name == "loss" and hasattr(metric, "count")), None)
    return 0 if loss is None else round(float(loss.count.numpy()))


def _assign(variables: list[Any], values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _flat(results: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat.update(_flat(value))
        else:
            flat[name] = float(value)
    return flat
