"""The division of a host's cores among its ranks: whole physical cores, each for one rank, with a thread per core.
Two unbound ranks, each with a thread pool for all cores, run slower than one rank alone.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

#: One physical core: the numbers of its hardware threads.
Core = tuple[int, ...]

_SYSFS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Share:
    """A rank's share of its host's cores; empty ``bind``: unbound; ``oversubscribed``: ranks must yield in waits."""

    bind: tuple[int, ...]
    threads: int
    oversubscribed: bool = False


def divide(cores: Sequence[Core], local_rank: int, local_size: int, quota: float | None = None) -> Share:
    """Returns ``local_rank``'s share of ``cores``, sorted by socket; ``quota``: the container's CPU quota, in cores.

    >>> divide([(0, 4), (1, 5), (2, 6), (3, 7)], local_rank=1, local_size=2)
    Share(bind=(2, 3, 6, 7), threads=2, oversubscribed=False)
    >>> divide([(0,), (1,)], local_rank=2, local_size=3)
    Share(bind=(), threads=1, oversubscribed=True)
    """
    count = len(cores)
    if local_size > count:
        return Share(bind=(), threads=1, oversubscribed=True)
    mine = cores[local_rank * count // local_size : (local_rank + 1) * count // local_size]
    threads = len(mine)
    if quota is not None:
        threads = max(1, min(threads, int(quota / local_size)))
    return Share(
        bind=tuple(sorted(cpu for core in mine for cpu in core)),
        threads=threads,
        oversubscribed=quota is not None and quota < local_size,
    )


def physical_cores(allowed: Sequence[int], sysfs: Path = _SYSFS) -> list[Core]:
    """Returns the physical cores of ``allowed``, sorted by socket; if the kernel hides them, each thread is a core."""
    groups: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        groups.setdefault(_address(sysfs / f"cpu{cpu}" / "topology", cpu), []).append(cpu)
    return [tuple(groups[address]) for address in sorted(groups)]


def _address(topology: Path, cpu: int) -> tuple[int, int]:
    """Returns (socket, first thread of the core): equal for the threads of one core, sorted by socket."""
    try:
        package = int((topology / "physical_package_id").read_text())
        siblings = (topology / "thread_siblings_list").read_text()
        first = int(siblings.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return (0, cpu)
    return (package, first)


def processor_quota(cgroup: Path = _CGROUP) -> float | None:
    """Returns this container's CPU quota, in cores; ``None`` if there is no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:  # "max": not limited
        return None


def allowed_processors(pid: int = 0) -> list[int]:
    """Returns the numbers of the processors that a process, by default this one, may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(pid))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Returns the number of physical cores that this process may use."""
    return len(physical_cores(allowed_processors()))


def share_of(local_rank: int, local_size: int, bind: bool) -> Share:
    """Returns the share of a rank on this host; if choros does not bind, mpirun may have bound this process already."""
    allowed = allowed_processors()
    cores = physical_cores(allowed)
    if not bind and len(allowed) < len(allowed_processors(os.getppid())):  # mpirun's, or its daemon's
        return Share(bind=(), threads=len(cores))
    share = divide(cores, local_rank, local_size, processor_quota())
    return share if bind else replace(share, bind=())
