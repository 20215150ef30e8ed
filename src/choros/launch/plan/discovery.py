"""The hosts of an elastic job as they come, go and fail: what a discovery script prints, and who is left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from choros.errors import ConfigError
from choros.launch.plan.hosts import Host, parse_line

__all__ = ["FAILURES", "Cooldown", "Discovery", "HostHealth", "parse_discovered"]

#: A host that has failed so many times is left out.
FAILURES = 3


def parse_discovered(text: str, slots: int | None = None, where: str = "--host-discovery-script") -> tuple[Host, ...]:
    """Returns the hosts in the output of a discovery script: a line ``host:slots``, or ``host``, for each.

    Args:
        text: the output.
        slots: the slots of hosts without a number; ``None``: 1.
        where: what has printed it, for the error.

    Raises:
        ConfigError: a line is no host.

    Example:
        >>> parse_discovered("a:4\\nb\\n", slots=2)
        (Host(name='a', slots=4), Host(name='b', slots=2))
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if not content:
            continue
        host = parse_line(content, slots or 1)
        if host is None or host.slots < 1:
            raise ConfigError(f"{where}, line {number} of its output: {content!r} is not `host:slots`.")
        found[host.name] = found.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in found.items())


@dataclass(frozen=True)
class Discovery:
    """How the hosts of an elastic job are found out while it exists.

    Attributes:
        script: the program that prints them; ``None``: they are those that the job was given.
        slots: the slots of hosts whose line has no number; ``None``: 1.
        cooldown: how long a host that has failed is left out; ``None``: for the rest of the job.
    """

    script: str | None = None
    slots: int | None = None
    cooldown: Cooldown | None = None


@dataclass(frozen=True)
class Cooldown:
    """For how many seconds a host that has failed is left out: ``least`` at first, doubled each time up to ``most``."""

    least: float
    most: float

    def seconds(self, times: int) -> float:
        """Returns how long the host is left out when that happens the ``times``-th time.

        Example:
            >>> [Cooldown(10, 60).seconds(times) for times in (1, 2, 3, 4)]
            [10.0, 20.0, 40.0, 60]
        """
        return min(self.most, self.least * 2.0 ** (times - 1))


@dataclass(frozen=True)
class HostHealth:
    """The failures of hosts, and those that are left out.

    Attributes:
        cooldown: how long a host is left out; ``None``: for the rest of the job.
        failures: the failures of each host since it was left out last.
        left_out: how many times each host has been left out.
        until: when it is taken in again; infinity: never.

    Example:
        >>> health = HostHealth(Cooldown(10, 60))
        >>> for _ in range(3):
        ...     health = health.failed("a", now=100.0)
        >>> health.usable((Host("a", 2), Host("b", 2)), now=105.0)
        (Host(name='b', slots=2),)
        >>> health.usable((Host("a", 2), Host("b", 2)), now=110.0)
        (Host(name='a', slots=2), Host(name='b', slots=2))
    """

    cooldown: Cooldown | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, float] = field(default_factory=dict)

    def failed(self, host: str, now: float) -> HostHealth:
        """Returns the health after a rank on ``host``, or the host itself, has failed."""
        failures = self.failures.get(host, 0) + 1
        if failures < FAILURES:
            return replace(self, failures={**self.failures, host: failures})
        times = self.left_out.get(host, 0) + 1
        end = float("inf") if self.cooldown is None else now + self.cooldown.seconds(times)
        return replace(
            self,
            failures={**self.failures, host: 0},
            left_out={**self.left_out, host: times},
            until={**self.until, host: end},
        )

    def usable(self, hosts: tuple[Host, ...], now: float) -> tuple[Host, ...]:
        """Returns the hosts that are not left out."""
        return tuple(host for host in hosts if now >= self.until.get(host.name, 0.0))
