"""A job on Spark: where the tasks of its barrier stage run, what the driver, the tasks and the programs beside them
send one another, and what a rank knows of its machine.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from choros.launch.bootstrap import unpack
from choros.launch.plan.arguments import Arguments
from choros.transport.address import this_host

#: The name with which the driver proves that it has the key.
DRIVER = "the Spark driver"
#: To the driver, the first message: all tasks run. It is answered with ``None`` when an earlier attempt of the stage
#: has ended, so that no two of them write commits.
STARTED = "started"
#: To the driver: all that ranks have printed has been sent. It is answered, too.
ALL_PRINTED = "all printed"
#: From the driver: another attempt of the stage has begun. The program ends its ranks, and then the connection.
SUPERSEDED = "superseded"

#: The variable with the accelerators that ranks see.
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Printed:
    """To the driver: what ranks have written to their standard output, or to their standard error."""

    error: bool
    text: str


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


#: The machine of this rank; ``None`` in processes that Spark has not placed.
_own: Machine | None = None


def run_packed(packed: bytes, machines: tuple[Machine, ...]) -> Any:
    """Runs the call that the driver has packed on this rank, which gets the accelerators of its machine's tasks.
    Modules are looked for where Spark's Python looks for them, then where the driver does.
    """
    global _own
    host = this_host()
    _own = next((machine for machine in machines if machine.host == host), None)
    if _own is not None and _own.visible:
        os.environ[VISIBLE] = ",".join(_own.visible)
    return unpack(packed, before=list(sys.path))()


def scratch_directory() -> str | None:
    """Returns the directory for temporary files that the ranks of this machine share, which the job removes at its end;
    ``None`` in processes that Spark has not placed.
    """
    return None if _own is None else _own.directory


def get_available_devices() -> list[str]:
    """Returns the accelerators that Spark has given to this rank's task, as the numbers that a framework knows them by,
    which sees only those of the job on this machine. Call it after ``init()``.
    """
    from choros.comm.context import local_rank

    if _own is None or not _own.visible:
        return []
    return [str(_own.visible.index(each)) for each in _own.devices[local_rank() % len(_own.devices)]]
