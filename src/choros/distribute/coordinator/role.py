"""What a process of a ParameterServer job is, apart from servers: its chief, or a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from choros.distribute.coordinator.remote_value import PerWorkerDataset, RemoteValue

if TYPE_CHECKING:
    from choros.distribute.parameter_server.session import Session

__all__ = ["Role"]


class Role(ABC):
    """The chief's program goes on after each of these; a worker's begins to serve the chief, and never comes back."""

    @property
    @abstractmethod
    def session(self) -> Session:
        """This process's variables and the way to the servers.

        Raises:
            StrategyError: this process does not take part yet.
        """

    @abstractmethod
    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
    ) -> RemoteValue:
        """Has a worker run ``function``; waits while ``limit`` functions are waiting or running."""

    @abstractmethod
    def join(self) -> None:
        """Waits until all functions are done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all functions are done."""

    @abstractmethod
    def dataset(self, made: Any) -> PerWorkerDataset:
        """A data set that every worker makes for itself: the only one of these that a worker comes back from."""
