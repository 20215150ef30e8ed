"""Every error choros raises, in one tree.

::

    ChorosError
    ├── ConfigError                 an argument or environment variable that cannot be meant
    ├── NotInitializedError         a collective before init()
    ├── StrategyError               a strategy in a place where it cannot be meant
    ├── LaunchError                 the job could not be started
    │   ├── HostUnreachable         a host does not exist or does not let us in
    │   ├── WorkerFailed            a rank ended with an error
    │   └── JobTimeout              the job took longer than --timeout
    └── EngineError                 what moves the bytes failed
        ├── EngineUnavailable       the engine cannot run here
        ├── ClosureCancelled        a scheduled function was not run, because another one failed
        ├── ParameterServerLost     a parameter server ended, and the variables with it
        └── MismatchError           ranks asked for different things

Each class carries the ``exit_code`` with which ``chorosrun`` ends when it meets the error.
"""

from __future__ import annotations

__all__ = [
    "ChorosError",
    "ClosureCancelled",
    "ConfigError",
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
    """Base of all errors of choros."""

    exit_code = 1


class ConfigError(ChorosError, ValueError):
    """An argument or environment variable has a value that cannot be meant.

    Also a ``ValueError``, which is what Horovod raises in the same places.
    """

    exit_code = 2


class NotInitializedError(ChorosError, ValueError):
    """A name that needs ``init()`` was used before it, or after ``shutdown()``.

    Also a ``ValueError``, as in Horovod.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} was called before choros was initialised: call init() once, near the top of the script "
            "(import choros.keras as hvd; hvd.init())."
        )


class StrategyError(ChorosError, RuntimeError):
    """A strategy, or what was made with one, was used in a place where it cannot be meant.

    Also a ``RuntimeError``, which is what ``tf.distribute`` raises in the same places.
    """

    exit_code = 2


class LaunchError(ChorosError):
    """The job could not be started, or did not end well."""

    exit_code = 70


class HostUnreachable(LaunchError):
    """A host of the job does not exist, or does not let us in."""

    exit_code = 68


class JobTimeout(LaunchError):
    """The job ran longer than its ``--timeout`` and was stopped."""

    exit_code = 124


class WorkerFailed(LaunchError):
    """A rank ended with an error.

    Attributes:
        rank: the rank that failed first.
        host: the host it ran on.
        exit_code: its exit code; ``128 + n`` if signal ``n`` ended it.
        traceback: the end of what it wrote to standard error: its Python traceback where there is one.
    """

    def __init__(self, message: str, *, rank: int, host: str, exit_code: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.traceback = traceback


class EngineError(ChorosError, RuntimeError):
    """What moves the bytes failed.

    Also a ``RuntimeError``, as Horovod's ``HorovodInternalError`` is.
    """


class EngineUnavailable(EngineError):
    """The engine cannot run here: something it needs is missing."""


class ClosureCancelled(EngineError):
    """A scheduled function was not run because another one failed before it; ``schedule`` or ``join`` raised that."""


class ParameterServerLost(EngineError):
    """A parameter server ended, and what it held of the variables and the optimizer state with it."""


class MismatchError(EngineError):
    """Ranks asked for different things in the same collective; no data was moved.

    Raised on every rank, with the same text: what each rank asked for.
    """
