"""Every error choros raises, in one tree.

::

    ChorosError
    ├── ConfigError                 an argument or environment variable has an invalid value
    │   └── UnsupportedError        no such operation exists for these arrays
    ├── NotInitializedError         a collective was called before init()
    ├── StrategyError               a strategy was used where it is not allowed
    ├── GraphRequiredError          a function of TensorFlow 1 was called eagerly
    ├── HostsUpdatedInterrupt       the hosts of an elastic job have changed: elastic.run goes on with them
    ├── LaunchError                 the job could not be started, or failed
    │   ├── HostUnreachable         a host does not exist or refuses the connection
    │   ├── WorkerFailed            a rank exited with an error
    │   └── JobTimeout              the job ran longer than --timeout
    └── EngineError                 the communication between processes failed
        ├── EngineUnavailable       the engine cannot run here
        ├── ClosureCancelled        a scheduled function was not run because another one failed
        ├── DriftError              ranks have different values of a variable that must be identical
        ├── PeerLostError           a process that this one waited for has ended, or cannot be reached
        │   └── ParameterServerLost a parameter server exited, and its variables are lost
        └── MismatchError           ranks called different collectives

Each class has the ``exit_code`` with which ``chorosrun`` exits after the error.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

#: The exit code of ranks and chorosrun when a job asked to end has committed: EX_TEMPFAIL, on which schedulers requeue.
PREEMPTED = 75


class ChorosError(Exception):
    """The base class of all errors of choros."""

    exit_code = 1
    if not TYPE_CHECKING:
        #: Out of a ``tf.function``, AutoGraph raises only errors with this constructor as what they are.
        __init__ = Exception.__init__


class ConfigError(ChorosError, ValueError):
    """An argument or environment variable has an invalid value.

    Also a ``ValueError``, which Horovod raises in the same cases.
    """

    exit_code = 2


class UnsupportedError(ConfigError, NotImplementedError):
    """No such collective operation, or not for these arrays; a ``RuntimeError`` too, as Horovod's in the same cases."""


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


class GraphRequiredError(ChorosError, RuntimeError):
    """A function that adds to a graph of TensorFlow 1 was called eagerly; a ``RuntimeError`` too, as Horovod's."""

    exit_code = 2


class HostsUpdatedInterrupt(ChorosError, RuntimeError):
    """The hosts of an elastic job have changed; ``elastic.run`` catches it, and goes on with them.

    Also a ``RuntimeError``, as in Horovod.

    Attributes:
        skip_sync: whether hosts were only removed, so that the ranks that are left have the same state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed.")
        self.skip_sync = skip_sync


class LaunchError(ChorosError, RuntimeError):
    """The job could not be started, or failed.

    Also a ``RuntimeError``, which ``horovod.run`` raises in the same cases.
    """

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

    def __reduce__(self) -> tuple[Any, ...]:  # by default it would be made without the keywords
        return type(self).__new__, (type(self), *self.args), vars(self)


class EngineError(ChorosError, RuntimeError):
    """The communication between processes failed.

    Also a ``RuntimeError``. Horovod's APIs name it ``HorovodInternalError``.
    """


class EngineUnavailable(EngineError, ValueError):
    """The engine cannot run here: something it requires is missing. Scripts for TPUs expect a ``ValueError``."""


class ClosureCancelled(EngineError):
    """A scheduled function was not run because an earlier one failed; ``schedule`` or ``join`` raised that error."""


class DriftError(EngineError):
    """Ranks have different values of a trained variable, which synchronous training keeps identical. The text, the
    same on every rank, names the first variable that differs, ranks that differ from most, and the largest difference.
    """


class PeerLostError(EngineError):
    """A process of the job that this one waited for was killed, has ended early, or cannot be reached any more.

    A program that such an error ends exits with 69: its launcher can start the job again from its last checkpoint.

    Attributes:
        ranks: the ranks that were lost, ascending; empty if the process has no rank, such as a parameter server.
        ends_job: the ranks that are left must not go on, although the job is elastic.
    """

    exit_code = 69

    def __init__(self, message: str = "", *, ranks: Iterable[int] = (), ends_job: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.ends_job = tuple(sorted(ranks)), ends_job


class ParameterServerLost(PeerLostError):
    """A parameter server exited; the variables and the optimizer state that it held are lost."""


class MismatchError(EngineError, ValueError):
    """Ranks called different collectives, or the same one with different arguments; no data was sent.

    Also a ``ValueError``, as Horovod's errors are for some mismatches.

    Raised on every rank with the same text, which lists each rank's call.
    """
