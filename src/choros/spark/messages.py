"""What the program beside the first task sends: to the driver through a channel, to its task through a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from choros.errors import ChorosError, LaunchError

#: The name with which the driver proves that it has the key.
DRIVER = "the Spark driver"


@dataclass(frozen=True)
class Started:
    """To the driver, the first message: the tasks run on these machines. It is answered when an earlier attempt of the
    stage has ended, so that no two of them write commits.
    """

    machines: tuple[str, ...]


@dataclass(frozen=True)
class Printed:
    """To the driver: what ranks have written to their standard output, or to their standard error."""

    error: bool
    text: str


@dataclass(frozen=True)
class Printings:
    """To the driver: all that ranks have printed has been sent. It is answered."""


@dataclass(frozen=True)
class Granted:
    """From the driver: the answer to both."""


@dataclass(frozen=True)
class Listening:
    """To the task: the hub listens at this port for the other machines; 0 if there are none."""

    port: int


@dataclass(frozen=True)
class Returned:
    """To the task: the ranks' results, pickled by the program, which has what unpickles them, or why there are none."""

    results: bytes = field(repr=False)
    failure: JobFailure | None = None


@dataclass(frozen=True)
class JobFailure:
    """An error of choros', as its parts: ``WorkerFailed`` has arguments that pickle does not give it."""

    kind: type[ChorosError]
    text: str
    values: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> JobFailure:
        """Takes ``error`` apart; one that is not choros' becomes a ``LaunchError``.

        >>> JobFailure.of(LaunchError("no slots")).error()
        LaunchError('no slots')
        """
        if isinstance(error, ChorosError):
            return cls(type(error), str(error), dict(vars(error)))
        return cls(LaunchError, f"{type(error).__name__}: {error}", {})

    def error(self) -> ChorosError:
        """Returns the error to raise."""
        error = self.kind.__new__(self.kind, self.text)
        vars(error).update(self.values)
        return error
