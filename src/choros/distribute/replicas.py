"""The replicas of a strategy: how they run a function together, and their collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from choros.distribute.reduce_op import ReduceOp

__all__ = ["Axis", "Replicas"]

#: One dimension, or several; ``None``: the replicas' values are reduced element by element.
Axis = int | Sequence[int] | None


class Replicas(ABC):
    """One replica per process of the job, or one per device of this process.

    Attributes:
        count: the number of replicas on all processes.
        local_count: the number of this process's replicas.
        first: the index of this process's first replica.
    """

    count: int
    local_count: int
    first: int

    @abstractmethod
    def run(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls ``function`` once for each replica of this process, in replica context."""

    @abstractmethod
    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """In cross-replica context: returns the reduced value, on every process."""

    @abstractmethod
    def gather(self, value: Any, axis: int) -> Any:
        """In cross-replica context: returns the replicas' values, concatenated along ``axis``."""

    @abstractmethod
    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """In replica context: returns the sum or the mean of the replicas' values."""

    @abstractmethod
    def all_gather(self, value: Any, axis: int) -> Any:
        """In replica context: returns the replicas' values, concatenated along ``axis``."""

    @abstractmethod
    def merge_call(
        self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """In replica context: calls ``function(strategy, …)`` in cross-replica context."""
