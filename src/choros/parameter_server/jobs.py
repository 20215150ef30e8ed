"""The jobs of a worker or a parameter server that serves one chief after another, and the end of its threads."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

from choros import durations
from choros.errors import EngineError, PeerLostError
from choros.parameter_server.cluster import Cluster
from choros.transport.channel import Channel, Listener

_log = logging.getLogger("choros")
Arrival = TypeVar("Arrival")

#: The names of the jobs that tasks in this process serve now; notified when one ends.
_served: list[str] = []
_changed = threading.Condition()
#: The threads of this process that serve connections, and those connections, if they still exist.
_threads: dict[threading.Thread, weakref.ref[Channel]] = {}
_ending = threading.Event()


def wait_for_chief(arrival: Callable[[float], Arrival | None], cluster: Cluster, listener: Listener) -> Arrival:
    """Returns ``arrival(seconds)``; EngineError if the chief does not connect within ``start_seconds``."""
    silent = min(durations.SERVERS_SLOW, cluster.start_seconds)
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
        _changed.wait_for(lambda: job not in _served, durations.SERVERS_END)


def end_at_exit(channel: Channel) -> None:
    """Makes the end of Python close this thread's channel and wait for it: frameworks release the lock, and a thread
    that retakes it while Python finalizes is unwound through C++ that allows no unwinding, which aborts.
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
    deadline = time.monotonic() + durations.SERVERS_END
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# Before any chief registers what ends its job in order: that happens first.
atexit.register(_end_threads)


@final
class JobServer:
    """Serves the chiefs that connect to this process's address, each in a thread; waits until the first job's end.
    ``serve`` takes this, a channel and its first message, and serves it: a chief's within ``job``.
    """

    def __init__(self, cluster: Cluster, serve: Callable[[JobServer, Channel, Any], None]) -> None:
        self.cluster = cluster
        #: What it keeps for each job.
        self.jobs: dict[str, Any] = {}
        self._serve = serve
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._in_order = False
        self._listener = Listener(cluster.address, cluster.key, cluster.name, self._arrived)

    @contextmanager
    def job(self, name: str, kept: Any = None) -> Iterator[None]:
        """The block in which the chief of the job ``name`` is connected; an error in it: the job has failed."""
        self.jobs[name] = kept
        self._begun.set()
        with _changed:
            _served.append(name)
        in_order = False
        try:
            yield
            in_order = True
        finally:
            self.jobs.pop(name, None)  # a chief that has connected again may have ended it
            with _changed:
                _served.remove(name)
                _changed.notify_all()
            if not self._ended.is_set():
                self._in_order = in_order
            self._ended.set()

    def run(self) -> None:
        """Waits until the first job has ended; PeerLostError if the chief's connection closed before that."""
        wait_for_chief(self._begun.wait, self.cluster, self._listener)
        self._ended.wait()
        if not self._in_order:
            raise chief_lost()

    def close(self) -> None:
        """Accepts no more connections."""
        self._listener.close()

    def _arrived(self, channel: Channel, first: Any) -> None:
        end_at_exit(channel)
        self._serve(self, channel, first)


def leave_signals_to_the_chief() -> None:
    """Ignores SIGINT and SIGTERM: they reach all at once, but the chief may save first, and needs the others for it."""
    if threading.current_thread() is threading.main_thread():  # Python allows it in the main thread only.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
