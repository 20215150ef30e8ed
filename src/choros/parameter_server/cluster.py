"""The processes of a parameter-server job, as the cluster resolver describes them: the connections to them, and how a
worker or a parameter server serves one chief after another, in threads that end before Python does.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from typing import Any, TypeVar, final

from choros import durations
from choros.comm import is_initialized
from choros.comm.process import exit_with_code_of_loss
from choros.comm.waiting import Reporter
from choros.errors import ConfigError, EngineError, ParameterServerLost, PeerLostError
from choros.observe.listeners import start_listeners
from choros.parameter_server.messages import Hello
from choros.settings import current
from choros.topology import TFConfig
from choros.transport.address import this_host
from choros.transport.channel import Channel, ChannelClosed, Failure, Listener, connect
from choros.transport.secret import Key, job_key

_log = logging.getLogger("choros")
Arrival = TypeVar("Arrival")

#: The name of the chief, which it proves to the others.
CHIEF = "the chief"

_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"chief": ["host:port"], "worker": ["host:port", …], "ps": ["host:port", …]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


@final
class TaskConnection:
    """A channel to a worker or a parameter server; a long wait for its messages is reported as one in ``call``."""

    def __init__(self, channel: Channel, call: str, ranks: Sequence[int]) -> None:
        self.peer, self.send, self.close = channel.peer, channel.send, channel.close
        self._channel = channel
        self._awaited = call, ranks

    def receive(self) -> Any:
        """Returns the next message."""
        with Reporter(lambda: self._awaited) as reporter:
            while not wait([self._channel.fileno()], durations.SERVERS_LOOK):
                reporter.check()
        return self._channel.receive()


@final
class Servers:
    """The connections to all servers.
    ``failure`` keeps a request's last error, as frameworks that call Python from compiled code wrap it in their own.
    """

    def __init__(self, connections: Sequence[TaskConnection]) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._connections = connections

    def __len__(self) -> int:
        return len(self._connections)

    def request(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls ``method`` on servers with their ``arguments``, on all before any reply is awaited; returns replies."""
        try:
            with self._lock:
                for server, each in arguments.items():
                    with self._detecting_loss(server):
                        self._connections[server].send((method, each))
                replies = {}
                for server in arguments:
                    with self._detecting_loss(server):
                        replies[server] = self._connections[server].receive()
            for reply in replies.values():
                if isinstance(reply, Failure):
                    raise reply.error()
        except Exception as error:
            self.failure = error
            raise
        return replies

    def shutdown(self) -> None:
        """Ends the servers; only the chief calls it."""
        for connection in self._connections:
            with suppress(ChannelClosed):
                connection.send(None)
                connection.close()

    @contextmanager
    def _detecting_loss(self, server: int) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise ParameterServerLost(
                f"{self._connections[server].peer} is lost, and with it the only copy of its shards of the variables "
                "and of the optimizer state. Restart the job from the last checkpoint."
            ) from error


@dataclass(frozen=True)
class Cluster:
    """The addresses of a job's processes, and the role of this process. The chief connects to the workers, again to one
    that was restarted, and it and they to the servers. Nothing listens at the chief's address, which is optional; roles
    also include ``evaluator``.
    """

    tasks: Mapping[str, tuple[str, ...]]
    role: str
    index: int
    start_seconds: float
    key: Key = field(repr=False)

    @classmethod
    def of(cls, spec: Any, role: str | None, index: int | None) -> Cluster:
        """Returns the cluster of a ``ClusterSpec``; ``role`` ``None`` is the chief; ConfigError if it is incomplete."""
        exit_with_code_of_loss()
        _start_listeners()
        missing = [name for name in ("worker", "ps") if not spec.as_dict().get(name)]
        if missing:
            raise ConfigError(
                "ParameterServerStrategy needs a cluster with workers and parameter servers; this one has no "
                f"{' and no '.join(missing)}. Start the script with chorosrun --ps 1 -np 2, start servers with "
                f"distribute.Server, or start every process with {_EXAMPLE}."
            )
        is_chief = role is None or (role == "chief" and "chief" not in spec.jobs)
        task = TFConfig.of(spec.as_dict(), *(("worker", 0) if is_chief else (role, index)))
        key = job_key(os.environ, [*task.cluster["worker"], *task.cluster["ps"]])
        role, index = ("chief", 0) if is_chief else (task.role, task.index)
        return cls(task.cluster, role, index, current().start_timeout, key)

    def rank(self, role: str, index: int) -> int:
        """Returns the rank of a process, as ``chorosrun --ps`` numbers them: the chief, the servers, the workers."""
        return {"chief": 0, "ps": 1 + index}.get(role, 1 + len(self.tasks["ps"]) + index)

    @property
    def name(self) -> str:
        """The name of this process, which it proves to the others."""
        return CHIEF if self.role == "chief" else _name(self.role, self.index)

    @property
    def address(self) -> str:
        """The address at which this process listens: a worker or a parameter server."""
        return self.tasks[self.role][self.index]

    def listen(self, serve: Callable[[Channel, Any], None]) -> Listener:
        """Listens at this process's address; calls ``serve`` with each channel and its first message, in a thread."""
        return Listener(self.address, self.key, self.name, serve)

    def connect(self, role: str, index: int, call: str, seconds: float | None = None) -> TaskConnection:
        """Returns a connection to a worker or a parameter server, which proves that it is this one. A long wait for its
        messages is reported as one in ``call``.
        """
        peer = _name(role, index)
        channel = connect(self.tasks[role][index], self.key, self.name, peer, seconds or self.start_seconds)
        return TaskConnection(channel, f"{call} {peer}", (self.rank(self.role, self.index), self.rank(role, index)))

    def servers(self, job: str) -> Servers:
        """Connects to all parameter servers, for this job."""
        connections = [self.connect("ps", index, "a request to") for index in range(len(self.tasks["ps"]))]
        for connection in connections:
            hello: Hello = job, this_process()
            connection.send(hello)
        return Servers(connections)


@cache
def _start_listeners() -> None:
    """Reports waits to chorosrun, in a process that does not call ``init()``."""
    if not is_initialized():
        start_listeners(current(), os.environ)


def this_process() -> tuple[str, int]:
    """Returns the host and the number of this process."""
    return this_host(), os.getpid()


def _name(role: str, index: int) -> str:
    return f"parameter server {index}" if role == "ps" else f"{role} {index}"


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
        self._listener = cluster.listen(self._arrived)

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
