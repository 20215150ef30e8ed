"""A fix for Open MPI's environment: the number of ranks on a rank's host.

Open MPI 5 reports the same number of ranks per host to every rank, that of one of the hosts, even if hosts have
different numbers. chorosrun, which assigns ranks to hosts, passes the correct numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["repairs"]

_RANK = "OMPI_COMM_WORLD_RANK"
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_WORLD_LOCAL_SIZE")


def repairs(environ: Mapping[str, str], ranks_per_host: Sequence[int]) -> dict[str, str]:
    """Returns the variables to correct in ``environ``.

    Args:
        environ: the wrapper's environment, set by mpirun.
        ranks_per_host: the number of ranks of each host, in the order of their ranks; empty if it is not known.

    Example:
        >>> names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
        >>> repairs(dict.fromkeys(names, "1"), (2, 1))["OMPI_COMM_WORLD_LOCAL_SIZE"]
        '2'
    """
    if not all(name in environ for name in (_RANK, _LOCAL_RANK, _LOCAL_SIZES[0])):
        return {}
    rank, local_rank, reported = (int(environ[name]) for name in (_RANK, _LOCAL_RANK, _LOCAL_SIZES[0]))
    size = _size_of_host(rank, local_rank, ranks_per_host) or max(reported, local_rank + 1)
    return {} if size == reported else dict.fromkeys(_LOCAL_SIZES, str(size))


def _size_of_host(rank: int, local_rank: int, ranks_per_host: Sequence[int]) -> int | None:
    """Returns the number of ranks on ``rank``'s host; ``None`` if mpirun has assigned ranks in another way."""
    first = 0
    for count in ranks_per_host:
        if rank < first + count:
            return count if rank - first == local_rank else None
        first += count
    return None
