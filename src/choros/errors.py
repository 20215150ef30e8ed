"""Every error choros raises, in one tree.

::

    ChorosError
    ├── ConfigError                 an argument or environment variable has an invalid value
    ├── NotInitializedError         a collective was called before init()
    ├── StrategyError               a strategy was used where it is not allowed
    ├── LaunchError                 the job could not be started, or failed
    │   ├── HostUnreachable         a host does not exist or refuses the connection
    │   ├── WorkerFailed            a rank exited with an error
    │   └── JobTimeout              the job ran longer than --timeout
    └── EngineError                 the communication between processes failed
        ├── EngineUnavailable       the engine cannot run here
        ├── ClosureCancelled        a scheduled function was not run because another one failed
        ├── DriftError              ranks have different values of a variable that must be identical
        ├── ParameterServerLost     a parameter server exited, and its variables are lost
        └── MismatchError           ranks called different collectives

Each class has the ``exit_code`` with which ``chorosrun`` exits after the error.
"""

from __future__ import annotations

__all__ = [
    "ChorosError",
    "ClosureCancelled",
    "ConfigError",
    "DriftError",
    "EngineError",
    "EngineUnavailable",
    "HostUnreachable",
    "JobTimeout",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "ParameterServerLost",
    "StrategyError",
    "WorkerFailed",
]


class ChorosError(Exception):
    """The base class of all errors of choros."""

    exit_code = 1


class ConfigError(ChorosError, ValueError):
    """An argument or environment variable has an invalid value.

    Also a ``ValueError``, which Horovod raises in the same cases.
    """

    exit_code = 2


class NotInitializedError(ChorosError, ValueError):
    """A function that needs ``init()`` was called before it, or after ``shutdown()``.

    Also a ``ValueError``, as in Horovod.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} was called before choros was initialised: call init() once, near the top of the script "
            "(import choros.keras as hvd; hvd.init())."
        )


class StrategyError(ChorosError, RuntimeError):
    """A strategy, or an object created with one, was used where it is not allowed.

    Also a ``RuntimeError``, which ``tf.distribute`` raises in the same cases.
    """

    exit_code = 2


class LaunchError(ChorosError):
    """The job could not be started, or failed."""

    exit_code = 70


class HostUnreachable(LaunchError):
    """A host of the job does not exist, or refuses the connection."""

    exit_code = 68


class JobTimeout(LaunchError):
    """The job ran longer than its ``--timeout`` and was stopped."""

    exit_code = 124


class WorkerFailed(LaunchError):
    """A rank exited with an error.

    Attributes:
        rank: the rank that failed first.
        host: the host it ran on.
        exit_code: its exit code; ``128 + n`` if signal ``n`` killed it.
        traceback: the last lines of its standard error: its Python traceback, if it printed one.
    """

    def __init__(self, message: str, *, rank: int, host: str, exit_code: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.traceback = traceback


class EngineError(ChorosError, RuntimeError):
    """The communication between processes failed.

    Also a ``RuntimeError``, as Horovod's ``HorovodInternalError`` is.
    """


class EngineUnavailable(EngineError):
    """The engine cannot run here: something it requires is missing."""


class ClosureCancelled(EngineError):
    """A scheduled function was not run because an earlier one failed; ``schedule`` or ``join`` raised that error."""


class DriftError(EngineError):
    """Ranks have different values of a trained variable, which synchronous training keeps identical.

    Ranks compare their variables once, after the first steps. The text, the same on every rank, names the variable that
    differs most and says by how much.
    """


class ParameterServerLost(EngineError):
    """A parameter server exited; the variables and the optimizer state that it held are lost."""


class MismatchError(EngineError):
    """Ranks called different collectives, or the same one with different arguments; no data was sent.

    Raised on every rank with the same text, which lists each rank's call.
    """
