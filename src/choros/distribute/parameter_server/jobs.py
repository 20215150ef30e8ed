"""The jobs of a worker or a parameter server that serves one chief after another, and the end of its threads."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

from choros.distribute.parameter_server.cluster import Cluster
from choros.errors import EngineError, PeerLostError
from choros.transport.channel import Channel
from choros.transport.listener import Listener

__all__ = ["Jobs", "ServedJob", "chief_lost", "end_at_exit", "wait_for_chief", "wait_for_end"]

#: After this time, a process says for whom it waits.
_SILENT_SECONDS = 10.0
_END_SECONDS = 5.0

_log = logging.getLogger("choros")
Arrival = TypeVar("Arrival")

#: The jobs that tasks in this process serve now; notified when one ends.
_served: set[ServedJob] = set()
_changed = threading.Condition()
#: The threads of this process that serve connections, and those connections, if they still exist.
_threads: dict[threading.Thread, weakref.ref[Channel]] = {}
_ending = threading.Event()


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


def chief_lost() -> PeerLostError:
    """Returns the error of a process whose chief was lost."""
    return PeerLostError("the connection to the chief closed before the job ended: see the chief's output.")


def wait_for_end(job: str) -> None:
    """Waits until no task in this process serves ``job``, which its chief has ended; for a few seconds at most."""
    with _changed:
        _changed.wait_for(lambda: all(served.name != job for served in _served), _END_SECONDS)


def end_at_exit(channel: Channel) -> None:
    """Makes the end of Python close the channel that this thread serves, and wait for the thread.

    Frameworks give Python's lock back while they compute and while they free tensors. A thread that wants it again
    once Python finalizes is unwound by Python, through C++ functions that allow no unwinding: the process aborts.
    """
    with _changed:
        for ended in [thread for thread in _threads if not thread.is_alive()]:
            del _threads[ended]
        _threads[threading.current_thread()] = weakref.ref(channel)
        if _ending.is_set():  # a chief on another host has connected again
            channel.close()


def _end_threads() -> None:
    with _changed:
        _ending.set()
        threads = dict(_threads)
    for channel in filter(None, (reference() for reference in threads.values())):
        channel.close()
    deadline = time.monotonic() + _END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# Before any chief registers what ends its job in order: that happens first.
atexit.register(_end_threads)


@final
class ServedJob:
    """A job, from the connection of its chief to its end.

    Attributes:
        name: its name.
        in_order: whether the chief has ended it, not failed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
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
    def job(self, name: str) -> Iterator[ServedJob]:
        """The block in which the chief of the job ``name`` is connected."""
        self._begun.set()
        job = ServedJob(name)
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
            EngineError: the chief did not connect in time.
            PeerLostError: its connection closed before it ended the job.
        """
        wait_for_chief(self._begun.wait, cluster, listener)
        self._ended.wait()
        if not self._in_order:
            raise chief_lost()
