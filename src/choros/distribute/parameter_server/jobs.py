"""The jobs of a worker or a parameter server that serves one chief after another, and its wait for the first one."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

from choros.distribute.parameter_server.cluster import Cluster
from choros.errors import EngineError
from choros.transport.listener import Listener

__all__ = ["Jobs", "ServedJob", "wait_for_chief", "wait_for_jobs_at_exit"]

#: After this time, a process says for whom it waits.
_SILENT_SECONDS = 10.0
_END_SECONDS = 5.0

_log = logging.getLogger("choros")
Arrival = TypeVar("Arrival")

#: The jobs that tasks in this process serve now; notified when one ends.
_served: set[ServedJob] = set()
_changed = threading.Condition()


def wait_for_chief(arrival: Callable[[float], Arrival | None], cluster: Cluster, listener: Listener) -> Arrival:
    """Returns ``arrival(seconds)``, which waits for the chief, and returns nothing if that does not connect.

    Raises:
        EngineError: the chief has not connected within the cluster's ``start_seconds``.
    """
    silent = min(_SILENT_SECONDS, cluster.start_seconds)
    arrived = arrival(silent)
    if not arrived and silent < cluster.start_seconds:
        _log.warning(
            "%s waits at %s for the chief to connect, for %g s at most.",
            cluster.name,
            cluster.address,
            cluster.start_seconds,
        )
        arrived = arrival(cluster.start_seconds - silent)
    if arrived:
        return arrived
    raise EngineError(
        f"the chief did not connect to {cluster.name} at {cluster.address} within {cluster.start_seconds:g} s. "
        + (listener.refusal or "It has not been started, has failed, or cannot reach this address: see its output.")
        + " CHOROS_START_TIMEOUT sets the time limit."
    )


@functools.cache
def wait_for_jobs_at_exit() -> None:
    """Makes the end of Python wait until no task in this process serves a job, for a few seconds at most.

    A thread that computes while Python ends would abort the process. Chiefs call this before they register what ends
    their jobs at exit, which therefore happens first.
    """
    atexit.register(_wait_for_jobs)


def _wait_for_jobs() -> None:
    with _changed:
        _changed.wait_for(lambda: not _served, _END_SECONDS)


@final
class ServedJob:
    """A job, from the connection of its chief to its end."""

    def __init__(self) -> None:
        self.in_order = False

    def ended_in_order(self) -> None:
        """Records that the chief has ended the job, not failed."""
        self.in_order = True


@final
class Jobs:
    """Waits until the first job has ended."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._in_order = False

    @contextmanager
    def job(self) -> Iterator[ServedJob]:
        """The block in which a chief is connected."""
        self._begun.set()
        job = ServedJob()
        with _changed:
            _served.add(job)
        try:
            yield job
        finally:
            with _changed:
                _served.remove(job)
                _changed.notify_all()
            if not self._ended.is_set():
                self._in_order = job.in_order
            self._ended.set()

    def wait(self, cluster: Cluster, listener: Listener) -> None:
        """Waits until the first job has ended.

        Raises:
            EngineError: the chief did not connect in time, or its connection closed before it ended the job.
        """
        wait_for_chief(self._begun.wait, cluster, listener)
        self._ended.wait()
        if not self._in_order:
            raise EngineError("the connection to the chief closed before the job ended: see the chief's output.")
