"""The rank's part: it is tied to an actor, whose end is its end, and runs what that one asks for; and ``log``.

::

    rank ──── Take: number, machine ───► registry: an actor there that has no rank (registry.py)
         ◄─── its address, GPUs ────────     none: the rank waits until there is one, for a while
         ──── number ───────────────────►    it has reached its actor
         ◄─── which actors are vacant ──     so that rank 0 starts new ranks only for actors without one
         ──── what log is given ────────► the callbacks of ``run``

    rank ──── number ───────────────────► actor (worker.py)
         ◄─── a packed function ────────     to call with the rank's object; or LEAVE, or END
         ──── what it returns, pickled ─►     or a traceback, as text, and then the rank ends
"""

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never, final

import cloudpickle

from choros import durations
from choros.errors import ConfigError, EngineError, LaunchError
from choros.launch.bootstrap import ADVICE, UNPICKLABLE, unpack
from choros.settings import VARIABLES
from choros.topology import detect
from choros.transport.address import this_host
from choros.transport.channel import Channel, ChannelClosed, Unreachable, connect
from choros.transport.secret import job_key

#: The names with which the executor and an actor prove that they have the key.
REGISTRY, ACTOR = "choros.ray's executor", "choros.ray's actor"
#: To a rank: its node goes away, leave in order; and: there are no further calls.
LEAVE, END = "leave", "end"


@dataclass(frozen=True)
class Take:
    """A rank's first message to the executor: it wants an actor on its ``machine``, the launcher's ``host``; not that
    at ``lost``, which does not answer. It is answered with the actor's address and what to add to the rank's
    environment; or, as there has been no actor for it, with the seconds for which it has waited.
    """

    rank: int
    machine: str
    host: str
    lost: str = ""


#: Where the executor of this rank listens.
_address = ""


def configure(address: str) -> None:
    """Sets it."""
    global _address
    _address = address


def log(info_dict: Any) -> None:
    """Gives ``info_dict`` to the ``callbacks`` of ``RayExecutor.run``, and returns when they have returned."""
    if not _address:
        warnings.warn("`ray_logger.log` called but logging is not configured.", stacklevel=2)
        return
    executor = connect(_address, job_key(os.environ, [_address]), "rank", REGISTRY, durations.RAY_CONNECT)
    executor.send(info_dict)
    executor.receive()
    executor.close()


def serve_calls(address: str, packed: bytes) -> None:
    """Makes this rank's object by a packed function, and runs calls with it for its actor until there are no more;
    ``address``: the executor's.
    """
    tie = ActorTie(address)
    try:
        subject = _unpacked(packed)()
        while (message := tie.next()) != END:
            tie.answer(_unpacked(message)(subject))
    except BaseException:
        tie.fail(traceback.format_exc())
        raise
    tie.release()


def run_tied(address: str, packed: bytes) -> Any:
    """Returns what one call returns, while this rank is tied to an actor."""
    tie = ActorTie(address)
    returned = _unpacked(packed)()
    tie.release()
    return returned


def _unpacked(packed: bytes) -> Any:
    return unpack(packed, before=tuple(sys.path))


@final
class ActorTie:
    """Waits for an actor on this machine; from then on this process lives as long as that actor and the executor."""

    def __init__(self, address: str) -> None:
        self._released = threading.Event()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._key = job_key(os.environ, [address])
        self._rank = detect(os.environ).rank
        self._vacant: Mapping[str, int] = {}
        executor, self._actor = self._take_actor(address)
        configure(address)
        _start_ranks_for(lambda host: self._vacant.get(host, 0))
        for watched in ((executor, "its executor", self._note_vacant), (self._actor, "its actor", self._note_message)):
            threading.Thread(target=self._watch, args=watched, name="choros: ray", daemon=True).start()

    def next(self) -> Any:
        """Returns the next message that says what to do."""
        return self._messages.get()

    def answer(self, value: Any) -> None:
        """Sends the actor what its call returns."""
        try:
            data = cloudpickle.dumps(value)
        except UNPICKLABLE as error:
            raise ConfigError(f"what the rank returns cannot be sent back: {error}. {ADVICE}") from error
        self._actor.send(data)

    def fail(self, text: str) -> None:
        """Says that the call has raised, and that this process ends."""
        self.release()
        self._actor.send(text)

    def release(self) -> None:
        """Unties this process, which ends in order."""
        self._released.set()

    def _take_actor(self, address: str) -> tuple[Channel, Channel]:
        """Returns the connections to the executor and to the actor that it gives this rank, once there is one."""
        slots = VARIABLES["slots"].read(os.environ).split(",")
        host, lost = slots[self._rank] if self._rank < len(slots) else "", ""
        while True:
            executor = connect(address, self._key, "rank", REGISTRY, durations.RAY_CONNECT)
            try:
                executor.send(Take(self._rank, this_host(), host, lost))
                seat: tuple[str, Mapping[str, str]] | float = executor.receive()
                if not isinstance(seat, tuple):
                    raise LaunchError(
                        f"rank {self._rank} has waited {seat:g} s for a worker of Ray's on its machine, and "
                        "there was none: one has ended, and Ray had no room for another. Call start() again."
                    )
                lost, environ = seat
                actor = connect(lost, self._key, "rank", ACTOR, durations.RAY_CONNECT_ACTOR)
                actor.send(self._rank)
                executor.send(self._rank)
            except (ChannelClosed, Unreachable):  # the actor has ended, and perhaps the executor does not know it yet
                executor.close()
                continue
            os.environ.update(environ)
            return executor, actor

    def _watch(self, channel: Channel, what: str, note: Callable[[Any], None]) -> None:
        try:
            while True:
                note(channel.receive())
        except (ChannelClosed, EngineError, EOFError, pickle.UnpicklingError):
            if not self._released.is_set():
                self._end(what)

    def _note_vacant(self, actors: Mapping[str, int]) -> None:
        """How many actors have no rank, by the launcher's names of their hosts."""
        self._vacant = actors

    def _note_message(self, message: Any) -> None:
        if message == LEAVE:
            threading.Thread(target=_leave, name="choros: leaves Ray's node", daemon=True).start()
        else:
            self._messages.put(message)

    def _end(self, what: str) -> Never:
        """Ends this process as if it had been killed: in an elastic job the others go on without it."""
        sys.stderr.write(f"choros.ray: rank {self._rank} ends, as {what} has ended.\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _leave() -> None:
    """Leaves in order, which a rank can once MPI has started: before that, its end would be that of the job."""
    from choros.comm import is_initialized

    while not is_initialized():
        time.sleep(durations.RAY_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


def _start_ranks_for(vacant: Any) -> None:
    """Lets this rank, if it is rank 0, start new ranks only for actors that have none."""
    if VARIABLES["elastic"].read(os.environ):
        from choros.comm.engines import mpi, mpi_admission  # the first one keeps the import from starting MPI

        del mpi
        mpi_admission.room = vacant
