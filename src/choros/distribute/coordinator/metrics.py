"""Metric reports: the workers' metrics, each over its own batches, added up on the chief.

A Keras metric keeps sums of losses, hits and weights, and divides them in ``result``. A worker resets its metrics
before it runs a function and reports their variables afterwards; the chief adds them to its own. Each batch is
therefore counted once, on any worker, and not at all if its worker was lost before it reported.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.distribute.parameter_server.scope_objects import Reference, ScopeObjects

__all__ = ["MetricReports", "Report", "count_metrics", "reset_metrics"]

Array = NDArray[Any]
#: The values of the metrics' variables, by metric.
Report = Mapping[Reference, list[Array]]


def reset_metrics(objects: ScopeObjects) -> None:
    """On a worker: resets all metrics."""
    for _, metric in objects.metrics():
        metric.reset_state()


def count_metrics(objects: ScopeObjects) -> Report:
    """On a worker: returns the metrics that changed since ``reset_metrics``."""
    counted = {reference: [_host(variable) for variable in metric.variables] for reference, metric in objects.metrics()}
    return {reference: values for reference, values in counted.items() if any(np.any(value) for value in values)}


@final
class MetricReports:
    """On the chief: collects the workers' reports; thread-safe."""

    def __init__(self, objects: ScopeObjects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._reports: list[Report] = []

    def add(self, report: Report) -> None:
        """Adds a report."""
        with self._lock:
            self._reports.append(report)

    def flush(self) -> bool:
        """Adds all reports to the chief's metrics; returns whether there were any."""
        with self._lock:
            reports, self._reports = self._reports, []
        for report in reports:
            for reference, values in report.items():
                for variable, value in zip(self._objects.resolve(reference).variables, values, strict=True):
                    summed = variable.aggregation == "sum"
                    variable.assign(_host(variable) + value if summed else value)
        return bool(reports)


def _host(variable: Any) -> Array:
    return np.array(adapter_of(variable.value).to_host(variable.value))
