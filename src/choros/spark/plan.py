"""Where the tasks of a barrier stage run, and what the program beside each machine's first task is to do. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from choros.launch.plan.arguments import Arguments


@dataclass(frozen=True)
class TaskPlace:
    """Where a task runs: its machine by its ``this_host``, the machine's address, a new directory for temporary files,
    and the accelerators that Spark has given to the task.
    """

    host: str
    address: str
    directory: str
    devices: Sequence[str] = ()


@dataclass(frozen=True)
class Machine:
    """A machine with ``tasks``, by their numbers; the first of them starts the machine's ranks, the others hold their
    slots. ``devices``: the accelerators of each task.
    """

    host: str
    address: str
    directory: str
    tasks: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...]

    @property
    def visible(self) -> tuple[str, ...]:
        """The accelerators of all tasks, each once: executors may share one."""
        return tuple(dict.fromkeys(each for own in self.devices for each in own))


def machines_of(places: Sequence[TaskPlace]) -> tuple[Machine, ...]:
    """Returns the machines on which the tasks run, in the order of their first tasks: executors of one machine are one.

    >>> a, b = TaskPlace("a", "10.0.0.1", "/tmp/x", ("0",)), TaskPlace("b", "10.0.0.2", "/tmp/y", ("0",))
    >>> [(machine.host, machine.tasks, machine.visible) for machine in machines_of([a, b, a])]
    [('a', (0, 2), ('0',)), ('b', (1,), ('0',))]
    """
    tasks: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        tasks.setdefault(place.host, []).append(number)
    machines = []
    for host, own in tasks.items():
        first = places[own[0]]
        devices = tuple(tuple(places[number].devices) for number in own)
        machines.append(Machine(host, first.address, first.directory, tuple(own), devices))
    return tuple(machines)


@dataclass(frozen=True)
class SparkJob:
    """A job: ``call`` as ``pack`` has packed it on the driver, which listens at ``driver`` for what ranks print.
    ``sentences`` are shown first; ``start``: the seconds in which all machines must have come.
    """

    arguments: Arguments
    call: bytes = field(repr=False)
    driver: str
    secret: str = field(repr=False)
    start: float
    sentences: tuple[str, ...] = ()
    executable: str | None = None


@dataclass(frozen=True)
class HostTask:
    """What the program beside the first task of machine ``index`` gets; ``port``: the hub's, on the other machines."""

    job: SparkJob
    machines: tuple[Machine, ...]
    index: int
    port: int
