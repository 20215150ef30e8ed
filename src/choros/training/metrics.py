"""Metrics over the examples of all ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from choros.comm import Reduction, global_process_set
from choros.parallel.ops import broadcast_arrays
from choros.training.metric_states import merged


def global_metrics(model: Any, *, counted: bool = False) -> dict[str, Any]:
    """The metrics as if one process had seen all rows: sums are reduced before a ratio is read; the model's stay."""
    with merged_metrics(() if counted else model.metrics):
        results = keras.tree.map_structure(_on_host, model.get_metrics_result())
    arrays = keras.tree.flatten(results)
    # The same sums may differ in the last bit between ranks, and ranks must make identical decisions.
    values = np.concatenate([np.zeros(0), *(array.reshape(-1) for array in arrays)])
    heirs = global_process_set.communicator.launched
    (values,) = broadcast_arrays([values], 0, names=["metric results"], heirs=heirs)
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


def global_result(metric: Any, result: Callable[[], Any]) -> Any:
    """Returns the value of ``result()`` while ``metric`` has the state of all ranks."""
    with merged_metrics([metric]):
        return result()


@contextmanager
def merged_metrics(metrics: Sequence[Any]) -> Iterator[None]:
    """A context in which ``metrics`` have the states of one process that has seen all ranks' examples."""
    variables, own, everywhere = merged(metrics)
    try:
        _assign(variables, everywhere)
        yield
    finally:
        _assign(variables, own)


def average_logs(logs: dict[str, Any], examples: float) -> dict[str, float]:
    """The ranks' mean of numbers that are no metrics, weighted by ``examples`` or shares; all ranks have the names."""
    names = sorted(name for name, value in logs.items() if np.ndim(value) == 0 and not isinstance(value, str))
    weighted = np.array([float(logs[name]) * examples for name in names] + [float(examples)])
    total = global_process_set.communicator.allreduce(weighted, Reduction.SUM, name=f"logs {', '.join(names)}")
    return {name: float(value / (total[-1] or 1.0)) for name, value in zip(names, total, strict=False)}


def count_examples(model: Any) -> int:
    """The number of examples that the model's metrics have seen on this rank; 0 if it has no loss metric."""
    loss = next((metric for metric in model.metrics if metric.name == "loss" and hasattr(metric, "count")), None)
    return 0 if loss is None else round(float(loss.count.numpy()))


def _on_host(result: Any) -> NDArray[np.float64]:
    return np.asarray(keras.ops.convert_to_numpy(result), np.float64)


def _assign(variables: list[Any], values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
