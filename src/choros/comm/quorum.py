"""The quorum: whether the ranks that are left after a loss may go on, so that no two parts of a job both do. Pure.

::

    host a  ranks 0 1 2 ┐                        go on: 3 are more than half of 4
                        ╳  the link is cut
    host b  rank 3      ┘                        stops: 1 is not, and cannot tell a lost host from a lost link

The death of a process is certain, as its host reports it; the loss of all ranks of a host at once is not: they may be
alive, and have lost the others. No more than one part of a job is more than half of it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

__all__ = ["why_not_to_go_on"]


def why_not_to_go_on(hosts: Sequence[Hashable], left: Collection[int], least: int) -> str:
    """Returns why the ranks that are left must not go on; empty if they may.

    Args:
        hosts: the host of each rank before the loss.
        left: the ranks, as they were then, that are left.
        least: the number of ranks with which the job may go on.

    Example:
        >>> why_not_to_go_on("aab", {0, 1}, least=1)
        ''
        >>> why_not_to_go_on("aabb", {0, 1}, least=1)
        '2 of 4 ranks are left, not more than half, and a whole host is lost, whose ranks may be alive'
        >>> why_not_to_go_on("aabb", {0, 2}, least=1)
        ''
        >>> why_not_to_go_on("aaa", {2}, least=2)
        '1 of 3 ranks is left, fewer than --min-np 2'
    """
    said = f"{len(left)} of {len(hosts)} ranks {'is' if len(left) == 1 else 'are'} left"
    if len(left) < least:
        return f"{said}, fewer than --min-np {least}"
    lost_hosts = set(hosts) - {hosts[rank] for rank in left}
    if lost_hosts and 2 * len(left) <= len(hosts):
        return f"{said}, not more than half, and a whole host is lost, whose ranks may be alive"
    return ""
