"""The roles of the processes in a job with parameter servers, and the processes' names in messages.

::

    rank    0       1 … P     P+1 … P+W          chorosrun --ps P -np W
    role    chief   ps 0 …    worker 0 …

In a job without parameter servers, processes have no roles, and messages name them by their ranks.

::

    chorosrun      chooses addresses and a secret    CHOROS_CLUSTER, CHOROS_SECRET, in mpirun's environment
       ▼
    mpirun ──►  wrapper of rank r                    derives its role from r, checks that its port is free
                   ▼
                COMMAND                              TF_CONFIG, CHOROS_SECRET, and no variables of MPI

Only workers and parameter servers listen at their addresses; the chief has one because ``TF_CONFIG`` requires it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from choros.launch.plan.environment import without_launchers
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.topology import TF_CONFIG, TFConfig

CHIEF, PS, WORKER = "chief", "ps", "worker"


@dataclass(frozen=True)
class Roles:
    """The roles of a job's processes; with 0 ``servers`` they have none.

    >>> [Roles(servers=1, workers=2).of(rank) for rank in range(4)]
    [('chief', 0), ('ps', 0), ('worker', 0), ('worker', 1)]
    >>> Roles(servers=1, workers=2).name(0), Roles(servers=1, workers=2).name(2), Roles().name(2)
    ('the chief', 'worker 0', 'rank 2')
    """

    servers: int = 0
    workers: int = 0

    def __bool__(self) -> bool:
        return self.servers > 0

    def of(self, rank: int) -> tuple[str, int] | None:
        """Returns the role of ``rank``, named as in ``TF_CONFIG``, and its index among those with the same one;
        ``None`` in a job without roles.
        """
        if not self:
            return None
        if rank == 0:
            return CHIEF, 0
        server = rank - 1
        return (PS, server) if server < self.servers else (WORKER, server - self.servers)

    def label(self, *ranks: int) -> str:
        """Returns the prefix of the output lines that ``ranks``, in increasing order, have written.

        >>> Roles().label(1), Roles().label(0, 2, 3, 4), Roles(servers=1, workers=3).label(0, 2, 3, 4)
        ('1', '0,2-4', 'chief, worker 0-2')
        """
        roles = [role for rank in ranks if (role := self.of(rank)) is not None]
        if not roles:
            return _ranges(ranks)
        return ", ".join(
            name if name == CHIEF else f"{name} {_ranges(index for _, index in same)}"
            for name, same in groupby(roles, key=lambda role: role[0])
        )

    def name(self, rank: int) -> str:
        """Returns the name of ``rank`` in a message."""
        return f"the {CHIEF}" if self and rank == 0 else f"{'' if self else 'rank '}{self.label(rank)}"

    def names(self, ranks: Sequence[int], most: int = 8) -> str:
        """Returns the names of several ranks in a message: at most ``most`` of them, and the number of the others.

        >>> Roles().names([3, 1]), Roles().names([0, 1, 2], most=2), Roles(1, 1).names([1, 2])
        ('ranks 1, 3', 'ranks 0, 1 and 1 more', 'ps 0, worker 0')
        """
        if len(ranks) == 1:
            return self.name(ranks[0])
        listed = ", ".join(self.label(rank) for rank in sorted(ranks)[:most])
        more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
        return f"{'' if self else 'ranks '}{listed}{more}"

    def kind(self, count: int) -> str:
        """Returns the noun for ``count`` of a job's processes.

        >>> Roles().kind(1), Roles().kind(2), Roles(1, 1).kind(3)
        ('rank', 'ranks', 'processes')
        """
        return ("process" if self else "rank") + ("" if count == 1 else "es" if self else "s")

    def directory(self, rank: int) -> str:
        """Returns the directory, below ``--output-dir``, for the output of ``rank``.

        >>> Roles().directory(1), Roles(1, 1).directory(1), Roles(1, 1).directory(0)
        ('rank.1', 'ps.0', 'chief')
        """
        return f"{'' if self else 'rank.'}{self.label(rank)}".replace(" ", ".")


def _ranges(numbers: Iterable[int]) -> str:
    """Returns increasing numbers as text, successive ones as ranges: ``0,2-4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


#: The roles of a job without parameter servers.
NO_ROLES = Roles()


def task_in(environ: Mapping[str, str], rank: int) -> TFConfig | None:
    """Returns the task of ``rank`` according to a wrapper's ``environ``; ``None`` in a job without roles."""
    cluster = json.loads(environ.get(CLUSTER, "{}"))
    role = Roles(len(cluster[PS]), len(cluster[WORKER])).of(rank) if cluster else None
    return None if role is None else TFConfig.of(cluster, *role)


def task_environment(environ: Mapping[str, str], task: TFConfig | None) -> dict[str, str]:
    """Returns the command's environment: ``environ``; with a task, ``TF_CONFIG`` replaces the launcher's variables.

    >>> cluster = '{"chief": ["a:1"], "ps": ["a:2"], "worker": ["b:3"]}'
    >>> environ = {"CHOROS_CLUSTER": cluster, "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2", "HOME": "/root"}
    >>> found = task_environment(environ, task_in(environ, rank=2))
    >>> sorted(found), found["TF_CONFIG"].partition('"task": ')[2]
    (['HOME', 'TF_CONFIG'], '{"type": "worker", "index": 0}}')
    """
    if task is None:
        return dict(environ)
    kept = {name: value for name, value in without_launchers(environ).items() if name != CLUSTER}
    return {**kept, TF_CONFIG: task.text()}
