"""SLURM's lists of hosts and of the tasks on each of them."""

import itertools
import re
from collections.abc import Iterator

from choros.errors import ConfigError


def expand_counts(text: str, name: str) -> list[int]:
    """Parses SLURM's list of ranks per host, ``text``, which is the value of the variable ``name``.

    >>> expand_counts("2(x3),1", "SLURM_STEP_TASKS_PER_NODE")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name}={text!r} is not a list of counts such as 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Parses SLURM's list of hosts, keeping its order; a ``ConfigError`` if ``text`` is not such a list.

    >>> expand_hosts("n[08-10,12]x,login,r[1-2]c[1-2]")
    ['n08x', 'n09x', 'n10x', 'n12x', 'login', 'r1c1', 'r1c2', 'r2c1', 'r2c2']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    hosts = [host for part in parts for host in _expand(part)]
    if ",".join(parts) != text or not hosts or not all(re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise ConfigError(f"SLURM_STEP_NODELIST={text!r} is not a list of hosts such as n[01-03,7],login.")
    return hosts


def _expand(part: str) -> Iterator[str]:
    """``"n[1-2]x"`` → ``n1x n2x``."""
    segments = re.findall(r"\[.*?\]|[^\[]+", part)
    choices = [list(_numbers(segment[1:-1])) if segment.startswith("[") else [segment] for segment in segments]
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    """``"08-10,12"`` → ``08 09 10 12``."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            yield f"[{part}]"  # invalid in a host name: the caller rejects the list
            continue
        first, last = match[1], match[2] or match[1]
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
