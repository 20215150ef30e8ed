"""A job on ready actors: their machines in order, the actors of chorosrun's part, and what it ends with."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Never, final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from choros import durations
from choros.errors import ChorosError, LaunchError
from choros.ray.launcher import HostAgent, JobLauncher
from choros.ray.messages import ActorPlace
from choros.ray.registry import ActorRegistry, ReadyActor
from choros.transport.address import this_host

_DEVICES = "CUDA_VISIBLE_DEVICES"


def in_order(actors: Sequence[ReadyActor], own_machine: str) -> list[list[ReadyActor]]:
    """Returns the actors of each machine: first those of the one where the job is launched, this one if it has any."""
    machines = list(dict.fromkeys(each.place.machine for each in actors))
    machines.sort(key=lambda machine: machine != own_machine)
    return [[each for each in actors if each.place.machine == machine] for machine in machines]


def number(machines: Sequence[Sequence[ReadyActor]], *, use_gpu: bool) -> list[ReadyActor]:
    """Numbers the actors as mpirun numbers their ranks, which see all GPUs of their machine; returns them in order."""
    for actors in machines:
        give_devices(actors, use_gpu=use_gpu)
    ordered = [each for actors in machines for each in actors]
    for index, each in enumerate(ordered):
        each.number = index
    return ordered


def give_devices(actors: Sequence[ReadyActor], *, use_gpu: bool) -> None:
    """Lets the ranks of a machine's actors see the GPUs of all: local rank n uses the n-th of them."""
    devices = ",".join(gpu for each in actors for gpu in each.place.gpus)
    for each in actors:
        each.environ = {_DEVICES: devices} if use_gpu else {}


@final
class RayJob:
    """A job on ``machines``, each with its actors; ``slots``: of each. ``call``: what the ranks run."""

    def __init__(
        self,
        secret: str,
        machines: Sequence[Sequence[ReadyActor]],
        slots: Sequence[int],
        call: Callable[[], Any],
        given: Mapping[str, Any],
    ) -> None:
        first = [actors[0].place for actors in machines]
        first[0] = _own_place(first[0])
        self._launcher = _pinned(JobLauncher, first[0].node, secret)
        self._agents: list[Any] = []
        if len(machines) == 1:
            given = {**given, "hosts": f"localhost:{slots[0]}"}
        else:
            address = ray.get(self._launcher.listen.remote(len(machines), slots[0]))
            for index, place in list(enumerate(first))[1:]:
                agent = _pinned(HostAgent, place.node, secret)
                agent.serve.remote(index, len(machines), slots[index], address)
                self._agents.append(agent)
        self.ended = self._launcher.run.remote(call, given)

    def has_ended(self) -> bool:
        """Whether it has ended, by whatever."""
        return bool(ray.wait([self.ended], timeout=0)[0])

    def result(self, seconds: float | None = None) -> list[Any]:
        """Returns what the ranks have returned, once they have; an error of choros if the job has failed."""
        try:
            returned: list[Any] = ray.get(self.ended, timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            raise_cause(error)
        except ray.exceptions.RayActorError as error:
            raise LaunchError(f"the actor that launches the job has ended, and all ranks with it: {error}") from error
        return returned

    def kill(self) -> None:
        """Ends what is left of it."""
        for actor in (self._launcher, *self._agents):
            with suppress(Exception):
                ray.kill(actor)


def raise_cause(error: "ray.exceptions.RayTaskError") -> Never:
    """Raises the error of choros that an actor has raised, as if it had been raised here."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ChorosError):
        raise cause from None
    raise error


def wait_for_ranks(registry: ActorRegistry, job: RayJob, count: int, seconds: float) -> None:
    """Waits until ``count`` ranks have their actors; the job's error if it ends before that."""
    waited = 0.0
    while not registry.wait(lambda actors: sum(each.rank is not None for each in actors) >= count, durations.RAY_LOOK):
        waited += durations.RAY_LOOK
        if job.has_ended():
            job.result()
            raise LaunchError("the job has ended before its ranks were started.")
        if waited > seconds + durations.RAY_CONNECT:
            raise LaunchError(f"{count} ranks did not come to their actors within {waited:.0f} s.")


def new_secret() -> str:
    """Returns a key for the processes of one executor."""
    return secrets.token_hex(32)


def _own_place(place: ActorPlace) -> ActorPlace:
    """On this machine, this node: it is there as long as the executor, while another node of Ray's may be lost."""
    if place.machine != this_host():
        return place
    return ActorPlace(ray.get_runtime_context().get_node_id(), place.machine, place.ip, place.pid, place.address)


def _pinned(cls: type, node: str, secret: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(cls).options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy).remote(secret)
