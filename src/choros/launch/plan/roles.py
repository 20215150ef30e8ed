"""The roles of the processes in a job with parameter servers, and the processes' names in messages.

::

    rank    0       1 … P     P+1 … P+W          chorosrun --ps P -np W
    role    chief   ps 0 …    worker 0 …

The chief is rank 0, followed by the parameter servers and then the workers. In a job without parameter servers,
processes have no roles, and messages name them by their ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["CHIEF", "NO_ROLES", "PS", "WORKER", "Role", "Roles"]

CHIEF, PS, WORKER = "chief", "ps", "worker"


@dataclass(frozen=True)
class Role:
    """A role, named as in ``TF_CONFIG``, and the index of the process among those with the same role."""

    name: str
    index: int = 0

    def __str__(self) -> str:
        return self.name if self.name == CHIEF else f"{self.name} {self.index}"


@dataclass(frozen=True)
class Roles:
    """The roles of a job's processes.

    Attributes:
        servers: the number of parameter servers; 0: processes have no roles.
        workers: the number of workers, if there are parameter servers.

    Example:
        >>> [str(Roles(servers=1, workers=2).of(rank)) for rank in range(4)]
        ['chief', 'ps 0', 'worker 0', 'worker 1']
        >>> Roles(servers=1, workers=2).name(0), Roles(servers=1, workers=2).name(2), Roles().name(2)
        ('the chief', 'worker 0', 'rank 2')
    """

    servers: int = 0
    workers: int = 0

    def __bool__(self) -> bool:
        return self.servers > 0

    def of(self, rank: int) -> Role | None:
        """Returns the role of ``rank``; ``None`` in a job without roles."""
        if not self:
            return None
        if rank == 0:
            return Role(CHIEF)
        server = rank - 1
        return Role(PS, server) if server < self.servers else Role(WORKER, server - self.servers)

    def label(self, *ranks: int) -> str:
        """Returns the prefix of the output lines that ``ranks``, in increasing order, have written.

        Example:
            >>> Roles().label(1), Roles().label(0, 2, 3, 4), Roles(servers=1, workers=3).label(0, 2, 3, 4)
            ('1', '0,2-4', 'chief, worker 0-2')
        """
        roles = [role for rank in ranks if (role := self.of(rank)) is not None]
        if not roles:
            return _ranges(ranks)
        return ", ".join(
            name if name == CHIEF else f"{name} {_ranges(role.index for role in same)}"
            for name, same in groupby(roles, key=lambda role: role.name)
        )

    def name(self, rank: int) -> str:
        """Returns the name of ``rank`` in a message."""
        return f"the {CHIEF}" if self and rank == 0 else f"{'' if self else 'rank '}{self.label(rank)}"

    def names(self, ranks: Sequence[int], most: int = 8) -> str:
        """Returns the names of several ranks in a message: at most ``most`` of them, and the number of the others.

        Example:
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

        Example:
            >>> Roles().kind(1), Roles().kind(2), Roles(1, 1).kind(3)
            ('rank', 'ranks', 'processes')
        """
        return ("process" if self else "rank") + ("" if count == 1 else "es" if self else "s")

    def directory(self, rank: int) -> str:
        """Returns the directory, below ``--output-dir``, for the output of ``rank``.

        Example:
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
