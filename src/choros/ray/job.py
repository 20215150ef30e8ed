"""The settings of a job; a job on ready actors: their machines in order, chorosrun's part of them, its end."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Never, final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from choros import durations
from choros.errors import ChorosError, LaunchError
from choros.launch.agents import HUB, HostSlots
from choros.launch.agents.agent import serve_host
from choros.launch.agents.hub import Hub
from choros.launch.plan.arguments import Arguments
from choros.launch.run import run_call
from choros.ray.registry import ActorRegistry, RankActor
from choros.settings import VARIABLES
from choros.topology.clusters import ClusterHost
from choros.transport.address import this_host
from choros.transport.channel import connect
from choros.transport.secret import Key

_CLUSTER = "the Ray cluster"
#: Ray sets it for an actor without CPUs; ranks have some.
_THREADS = "OMP_NUM_THREADS"


@dataclass
class RaySettings:
    """The settings of an executor, in seconds; ``discovery`` says where elastic jobs may run, as Horovod's."""

    nics: Any = None
    verbose: int = 1
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    elastic: bool = False
    discovery: Any = None
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    options: dict[str, Any] = field(default_factory=dict)


def slots_of(actors: Mapping[str, int], most: int) -> dict[str, int]:
    """Returns the slots of machines, in order, by their ``actors``: the last one has room for all that may come.

    >>> slots_of({"a": 2, "b": 1}, most=4)
    {'a': 2, 'b': 2}
    """
    last = list(actors)[-1]
    return {**actors, last: actors[last] + max(0, most - sum(actors.values()))}


def in_order(actors: Sequence[RankActor], own_machine: str) -> list[RankActor]:
    """Returns the actors by machines: first those of the one where the job is launched, this one if it has any."""
    machines = list(dict.fromkeys(each.machine for each in actors))
    return sorted(actors, key=lambda each: (each.machine != own_machine, machines.index(each.machine)))


@final
class JobLauncher:
    """The actor that is chorosrun's part on one machine: runs a job, with the key ``secret``, or its ranks on another
    machine than the first. It holds no CPUs, and needs the main thread of its process, for signals.
    """

    def __init__(self, secret: str) -> None:
        os.environ[VARIABLES["secret"].name] = secret
        os.environ.pop(_THREADS, None)
        self._hub: Hub | None = None

    def listen(self, machines: int, slots: int) -> str:
        """Waits for agents of the other ``machines`` from now on, with ``slots`` here; returns at which address."""
        self._hub = Hub(ClusterHost(_CLUSTER, 0, machines, slots=slots, port=0))
        return f"{ray.util.get_node_ip_address()}:{self._hub.port}"

    def run(self, call: Callable[[], Any], given: Mapping[str, Any]) -> list[Any]:
        """Runs ``call`` on the ranks of a job with these ``Arguments``; returns what they return."""
        arguments = Arguments(in_python=True, **given)
        if self._hub is None:
            return run_call(call, arguments)
        try:
            return run_call(call, self._hub.gather(arguments, durations.AGENTS))
        finally:
            self._hub.close(0)

    def serve(self, index: int, slots: int, address: str) -> int:
        """Runs the ranks of machine ``index`` of a job, for its launcher at ``address``, until it ends."""
        first, _, port = address.rpartition(":")
        return serve_host(ClusterHost(_CLUSTER, index, None, first, slots, int(port)), durations.AGENTS)


@final
class RayJob:
    """A job whose ranks run ``call`` on the actors of ``registry``; with ``most``, others may come until there are so
    many.

    Attributes:
        actors: in the order in which mpirun numbers their ranks.
    """

    def __init__(
        self, registry: ActorRegistry, call: Callable[[], Any], given: Mapping[str, Any], most: int | None = None
    ) -> None:
        self._registry = registry
        self.actors = in_order(registry.actors, this_host())
        for number, each in enumerate(self.actors):
            each.number = number
        #: By machine, in the order of their hosts: how many ranks it takes when the job is started again.
        self._slots = _counts(self.actors)
        self._are_told = False
        first = self.actors[0]
        # On this machine, this node: it is there as long as the executor, while another node of Ray's may be lost.
        node = ray.get_runtime_context().get_node_id() if first.machine == this_host() else first.node
        self._launcher = self._pinned(node)
        self._agents: dict[str, tuple[Any, Any]] = {}
        self._address = ""
        given = {**given, "num_proc": len(self.actors)}
        if most is not None:
            given["max_num_proc"] = most = max(most, len(self.actors))
        slots = slots_of(self._slots, most or len(self.actors))
        if len(slots) == 1 and not (most is not None and registry.is_reachable):
            given["hosts"] = f"localhost:{slots[first.machine]}"
        else:
            try:
                self._address = ray.get(self._launcher.listen.remote(len(slots), slots[first.machine]))
            except ray.exceptions.RayActorError as error:
                raise LaunchError(f"the actor that launches the job could not be started: {error}") from error
            for machine in list(slots)[1:]:
                self._add_machine(machine, slots, self.actors)
        self.ended = self._launcher.run.remote(call, given)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended within ``seconds``, by whatever."""
        return bool(ray.wait([self.ended], timeout=seconds)[0])

    def wait_for_ranks(self, seconds: float) -> None:
        """Waits until all ranks have their actors; the job's error if it ends before that."""
        waited, count = 0.0, len(self.actors)
        while not self._registry.wait(lambda actors: sum(each.seated for each in actors) >= count, durations.RAY_LOOK):
            waited += durations.RAY_LOOK
            if self.has_ended():
                self.result()
                raise LaunchError("the job has ended before its ranks were started.")
            if waited > seconds + durations.RAY_CONNECT:
                raise LaunchError(f"{count} ranks did not come to their actors within {waited:.0f} s.")

    def follow(self) -> None:
        """Lets the job know of more actors, and of machines that have some now: it goes on there from a commit."""
        actors = self._registry.actors
        if not self._address or not any(each.seated for each in actors):
            return  # it begins with slots for all ranks that may come
        counts = _counts(actors)
        ended = {machine for machine, (_, served) in self._agents.items() if ray.wait([served], timeout=0)[0]}
        added = [machine for machine in counts if machine not in self._slots or machine in ended]
        if added:
            time.sleep(durations.RAY_MORE)  # for all actors of these machines
            actors = self._registry.actors
            counts = _counts(actors)
        slots = {machine: max(count, counts.get(machine, 0)) for machine, count in self._slots.items()}
        slots |= {machine: counts[machine] for machine in added if machine in counts}
        if self._are_told and slots == self._slots and not added:
            return
        key = Key(bytes.fromhex(self._registry.secret))
        with closing(connect(self._address, key, "executor", HUB, durations.RAY_CONNECT)) as hub:
            hub.send(HostSlots(dict(enumerate(slots.values()))))
            hub.receive()
        self._slots, self._are_told = slots, True
        for machine in added:
            if machine in counts:
                self._add_machine(machine, slots, actors)

    def _add_machine(self, machine: str, slots: Mapping[str, int], actors: Sequence[RankActor]) -> None:
        agent = self._pinned(next(each.node for each in actors if each.machine == machine))
        served = agent.serve.remote(list(slots).index(machine), slots[machine], self._address)
        self._agents[machine] = agent, served

    def _pinned(self, node: str) -> Any:
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, False)}
        return ray.remote(JobLauncher).options(**options).remote(self._registry.secret)

    def result(self, seconds: float | None = None) -> list[Any]:
        """Returns what the ranks have returned, once they have; an error of choros if the job has failed."""
        try:
            returned: list[Any] = ray.get(self.ended, timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            raise_cause(error)
        except ray.exceptions.GetTimeoutError:
            raise
        except ray.exceptions.RayError as error:
            raise LaunchError(f"the actor that launches the job has ended, and all ranks with it: {error}") from error
        return returned

    def kill(self) -> None:
        """Ends what is left of it."""
        for actor in (self._launcher, *(agent for agent, _ in self._agents.values())):
            with suppress(Exception):
                ray.kill(actor)


def raise_cause(error: "ray.exceptions.RayTaskError") -> Never:
    """Raises the error of choros that an actor has raised, as if it had been raised here."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ChorosError):
        raise cause from None
    raise error


def _counts(actors: Sequence[RankActor]) -> dict[str, int]:
    return dict(Counter(each.machine for each in actors))
