"""A job on Spark: where the tasks of its barrier stage run, and what the driver, the tasks and the programs beside them
send one another. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from choros.errors import ChorosError
from choros.launch.plan.arguments import Arguments

#: The name with which the driver proves that it has the key.
DRIVER = "the Spark driver"
#: To the driver, the first message: all tasks run. It is answered with ``None`` when an earlier attempt of the stage
#: has ended, so that no two of them write commits.
STARTED = "started"
#: To the driver: all that ranks have printed has been sent. It is answered, too.
ALL_PRINTED = "all printed"
#: From the driver: another attempt of the stage has begun. The program ends its ranks, and then the connection.
SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Printed:
    """To the driver: what ranks have written to their standard output, or to their standard error."""

    error: bool
    text: str


@dataclass(frozen=True)
class Returned:
    """To the task: the ranks' results, pickled by the program, which has what unpickles them, or why there are none."""

    results: bytes = field(repr=False)
    failure: ChorosError | None = None


@dataclass(frozen=True)
class Machine:
    """A machine by its ``this_host``, its address, and a new directory for temporary files, with ``tasks``, by their
    numbers; the first of them starts the machine's ranks, the others hold their slots. ``devices``: the accelerators
    that Spark has given to each task.
    """

    host: str
    address: str
    directory: str
    tasks: Sequence[int]
    devices: Sequence[Sequence[str]]

    @property
    def visible(self) -> tuple[str, ...]:
        """The accelerators of all tasks, each once: executors may share one."""
        return tuple(dict.fromkeys(each for own in self.devices for each in own))


def machines_of(tasks: Sequence[Machine]) -> tuple[Machine, ...]:
    """Returns the machines of ``tasks``, each as one that has only this task: executors of one machine are one.

    >>> a, b = Machine("a", "10.0.0.1", "/tmp/x", [0], [["0"]]), Machine("b", "10.0.0.2", "/tmp/y", [1], [["0"]])
    >>> [(machine.host, machine.tasks, machine.visible) for machine in machines_of([a, b, replace(a, tasks=[2])])]
    [('a', [0, 2], ('0',)), ('b', [1], ('0',))]
    """
    found: dict[str, Machine] = {}
    for each in tasks:
        own = found.setdefault(each.host, each)
        if own is not each:
            merged = replace(own, tasks=[*own.tasks, *each.tasks], devices=[*own.devices, *each.devices])
            found[each.host] = merged
    return tuple(found.values())


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
