"""The actors of ranks: each holds the resources of one rank, and passes calls on to it; and how Ray places them."""

import os
import pickle
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from choros import durations
from choros.errors import LaunchError, WorkerFailed
from choros.ray.rank import ACTOR, END, LEAVE
from choros.ray.registry import RankActor
from choros.transport.address import LOOPBACK, this_host
from choros.transport.channel import Channel, ChannelClosed, Listener
from choros.transport.secret import Key

#: The threads of an actor for calls that do not wait for one another, while those of ranks keep their order.
CONTROL = "control"


class RayWorker:
    """The class of these actors; its names are those of Horovod's ``BaseHorovodWorker``."""

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self._changed = threading.Condition()
        self._rank: tuple[Channel, int] | None = None
        self._calling = threading.Lock()
        os.environ["HOROVOD_HOSTNAME"] = self.hostname()
        os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"] = str(world_rank), str(world_size)

    def hostname(self) -> str:
        """The name of this host."""
        return socket.gethostname()

    def node_id(self) -> str:
        """Ray's number of this node."""
        return str(ray.get_runtime_context().get_node_id())

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs of this actor."""
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: dict[str, Any]) -> None:
        """Sets variables in this actor's environment."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """This actor's environment."""
        return dict(os.environ)

    def listen(self, secret: str) -> tuple[str, str, str, Sequence[str]]:
        """Begins to listen for a rank of this machine; returns the arguments of ``RankActor.note_place``."""
        listening = socket.create_server((LOOPBACK, 0))
        address = f"{LOOPBACK}:{listening.getsockname()[1]}"
        self._listener = Listener(listening, Key(bytes.fromhex(secret)), ACTOR, self._serve)
        return self.node_id(), this_host(), address, tuple(map(str, self.get_gpu_ids()))

    def execute(self, packed: bytes) -> Any:
        """Returns what the rank's call returns; ``WorkerFailed`` if it raises, or the rank ends."""
        with self._calling:
            found = self._connected()
            if found is None:
                raise LaunchError("no rank is connected to this actor: the executor was not started, or has ended.")
            channel, rank = found
            try:
                channel.send(packed)
                answer = channel.receive()
            except ChannelClosed as error:
                raise _failed(rank, "has ended before its call returned", "") from error
        if isinstance(answer, str):
            raise _failed(rank, f"has raised an exception:\n{answer}", answer)
        return pickle.loads(answer)  # noqa: S301  (from a rank of this job)

    def leave(self) -> None:
        """Asks the rank to leave in order."""
        self._tell(LEAVE)

    def end(self) -> None:
        """Tells the rank that there are no further calls."""
        self._tell(END)

    def stay(self) -> None:
        """Does not return: the executor, which waits for it, learns of the end of this actor."""
        threading.Event().wait()

    def _serve(self, channel: Channel, rank: int) -> None:
        with self._changed:
            self._rank = channel, rank
            self._changed.notify_all()

    def _tell(self, message: Any) -> None:
        found = self._connected()
        if found is not None:
            with suppress(ChannelClosed):  # the rank has ended
                found[0].send(message)

    def _connected(self) -> tuple[Channel, int] | None:
        """Returns the rank of this actor, for which it waits a while: it has been sent here."""
        with self._changed:
            self._changed.wait_for(lambda: self._rank is not None, durations.RAY_CONNECT)
            return self._rank


def _failed(rank: int, what: str, text: str) -> WorkerFailed:
    host = socket.gethostname()
    return WorkerFailed(f"rank {rank} on {host} {what}", rank=rank, host=host, exit_code=1, traceback=text)


def create_placement_group(
    resources_per_bundle: Mapping[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[PlacementGroup, list[dict[str, float]]]:
    """Returns a new placement group and its bundles; ``TimeoutError``: the cluster has no room for it in time."""
    bundles = [{name: value for name, value in resources_per_bundle.items() if value} for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    try:
        ready, _ = ray.wait([group.ready()], timeout=pg_timeout)
        if not ready:
            raise no_room(f"{bundles} ({pg_strategy})", pg_timeout)
    except BaseException:
        remove_placement_group(group)
        raise
    return group, bundles


def no_room(what: str, seconds: float) -> TimeoutError:
    """Returns the error that says that Ray has not had the resources for ``what``."""
    return TimeoutError(
        f"Ray had no room for {what} within {seconds:g} s; free are {ray.available_resources()}. Use fewer workers, "
        "wait until others have ended, or give create_settings a larger placement_group_timeout_s."
    )


def hire(worker: Mapping[str, float], secret: str, *args: Any, host: str = "", **options: Any) -> RankActor:
    """Returns a new actor that holds the resources of a worker, with further options of Ray's."""
    groups = {CONTROL: 3}  # not max_concurrency, with which Ray does not keep the order of calls
    kind = ray.remote(
        num_cpus=worker["CPU"], num_gpus=worker["GPU"], concurrency_groups=groups, max_restarts=0, **options
    )
    handle = kind(RayWorker).remote(*args)
    ended = handle.stay.options(concurrency_group=CONTROL).remote()
    return RankActor(handle, handle.listen.remote(secret), ended, host)
