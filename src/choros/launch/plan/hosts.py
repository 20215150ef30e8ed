"""The hosts of a job: ``-H a:4,b:4`` or a host file."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from choros.errors import ConfigError

#: More ranks than any machine can run: a larger number is a mistake.
MOST_SLOTS = 1 << 20
_NAME = r"(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)"
_LINE = re.compile(_NAME + r"(?::(?P<short>\d+))?(?:\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Host:
    """A machine and its slots: how many ranks may run on it."""

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Returns the hosts in ``name:slots,name:slots``; a host without a number has one slot.

    >>> parse_hosts("a:4,b")
    (Host(name='a', slots=4), Host(name='b', slots=1))
    """
    hosts = []
    for part in map(str.strip, text.split(",")):
        problem = f"--hosts {text!r}: {part!r} is not a host. Write it as name:slots,name:slots, like a:4,b:4."
        hosts.append(_host("" if re.search(r"\s", part) else part, problem))
    return _merged(hosts, f"--hosts {text if len(text) <= 80 else f'{text[:80]}…'!r}")


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """Returns the hosts in a file with lines ``name slots=N`` or ``name:N``; ``#`` begins a comment."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: the file cannot be read ({error}).") from error
    lines = ((number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    hosts = [
        _host(line, f"--hostfile {path}, line {number}: {line!r} is not `name slots=N` or `name:N`.")
        for number, line in lines
        if line
    ]
    if not hosts:
        raise ConfigError(f"--hostfile {path}: the file names no host. Write one line `name slots=N` for each host.")
    return _merged(hosts, f"--hostfile {path}")


def parse_discovered(text: str, slots: int | None = None, where: str = "--host-discovery-script") -> tuple[Host, ...]:
    """Returns the hosts a discovery script printed, as ``host:slots`` or ``host`` lines; ``where`` is for the error.

    >>> parse_discovered("a:4\\nb\\n", slots=2)
    (Host(name='a', slots=4), Host(name='b', slots=2))
    """
    hosts = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        problem = f"{where}, line {number} of its output: {line!r} is not `host:slots`."
        hosts += [_host(line, problem, slots or 1)] if line else []
        if line and hosts[-1].slots < 1:
            raise ConfigError(problem)
    return _merged(hosts, where)


def _host(text: str, problem: str, slots: int = 1) -> Host:
    """Returns the host in a line, by default with ``slots`` slots; a ``ConfigError``, the ``problem``, if it is none.

    >>> _host("a slots=4", ""), _host("a", "", slots=2)
    (Host(name='a', slots=4), Host(name='a', slots=2))
    """
    match = _LINE.fullmatch(text)
    if match is None:
        raise ConfigError(problem)
    digits = match["slots"] or match["short"]
    if digits is not None:  # so many that they are no number to Python are too many
        slots = int(digits) if len(digits) <= len(str(MOST_SLOTS)) else MOST_SLOTS + 1
    return Host(match["name"].strip("[]"), slots)


def _merged(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        if ":" in host.name:
            raise ConfigError(
                f"{where}: mpirun takes no IPv6 address, such as {host.name}: give the host a name, in /etc/hosts or "
                "as a Host of ~/.ssh/config."
            )
        if host.slots < 1:
            raise ConfigError(f"{where}: host {host.name} has no slots; give it at least one or leave it out.")
        if host.slots > MOST_SLOTS:
            raise ConfigError(f"{where}: host {host.name} has more than {MOST_SLOTS} slots; give it one for each rank.")
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def total_slots(hosts: Iterable[Host]) -> int:
    """Returns the sum of the hosts' slots."""
    return sum(host.slots for host in hosts)


def ranks_per_host(hosts: Iterable[Host], size: int) -> tuple[int, ...]:
    """Returns the number of ranks of each host when ``size`` ranks fill one host after the other.

    >>> ranks_per_host(parse_hosts("a:2,b:2,c:2"), 3)
    (2, 1)
    """
    return tuple(Counter(hosts_of_ranks(hosts, size)).values())


def hosts_of_ranks(hosts: Iterable[Host], size: int) -> tuple[str, ...]:
    """Returns the host of each rank when ``size`` ranks fill one host after the other.

    >>> hosts_of_ranks((Host("a", 2), Host("b", 2)), 3)
    ('a', 'a', 'b')
    """
    return tuple(host.name for host in hosts for _ in range(host.slots))[:size]
