"""The role of a process in a parameter-server job, other than the servers: the chief or a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from choros.distribute.coordinator.remote_value import PerWorkerDataset, RemoteValue

if TYPE_CHECKING:
    from choros.distribute.parameter_server.session import ServerSession

__all__ = ["CoordinatorRole"]


class CoordinatorRole(ABC):
    """The chief or a worker: these methods return on the chief; on a worker they serve the chief and never return."""

    @property
    @abstractmethod
    def session(self) -> ServerSession:
        """The server session of this process.

        Raises:
            StrategyError: this process does not participate yet.
        """

    @abstractmethod
    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
    ) -> RemoteValue:
        """Schedules ``function`` on a worker; blocks while ``limit`` functions are waiting or running."""

    @abstractmethod
    def join(self) -> None:
        """Waits until all functions are done."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether all functions are done."""

    @abstractmethod
    def dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Returns the handle of a data set that every worker creates for itself; a worker returns from it too."""
