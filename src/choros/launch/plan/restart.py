"""What chorosrun does after an elastic job has lost mpirun, a host or a link: restart it, wait for hosts, or end. Pure.

::

    launch ──► its end ──► a loss? ── no ─────────────────────────────────────► the job's outcome
       ▲                      │ yes
       │                      ▼
       │        ┌──────── next_step ──┬─ why not: --reset-limit, --elastic-timeout ─► exit code 69
       │        │             ▲       └─ None: wait ─────┐
       │     hosts            └──────── one second ──────┘
       └────────┘  on the hosts that are left, from the last commit
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from choros.launch.plan.hosts import Host, hosts_of_ranks, total_slots
from choros.launch.plan.job import Elastic, Job
from choros.settings import VARIABLES
from choros.wording import count_text

#: A host that has failed so many times is left out.
FAILURES = 3


@dataclass(frozen=True)
class HostHealth:
    """For each host that has failed: how often since it was left out last, how often it was, and until when it is.
    See ``Elastic`` for ``cooldown``, which is doubled each time.

    >>> health = HostHealth((10, 60))
    >>> for _ in range(3):
    ...     health = health.failed("a", now=100.0)
    >>> health.usable((Host("a", 2), Host("b", 2)), now=105.0)
    (Host(name='b', slots=2),)
    >>> health.usable((Host("a", 2), Host("b", 2)), now=110.0)
    (Host(name='a', slots=2), Host(name='b', slots=2))
    """

    cooldown: tuple[float, float] | None = None
    hosts: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)

    def failed(self, host: str, now: float) -> HostHealth:
        """Returns the health after a rank on ``host``, or the host itself, has failed."""
        failures, times, until = self.hosts.get(host, (0, 0, 0.0))
        failures += 1
        if failures == FAILURES:
            failures, times = 0, times + 1
            least, most = self.cooldown or (math.inf, math.inf)
            until = now + min(most, least * 2.0 ** (times - 1))
        return replace(self, hosts={**self.hosts, host: (failures, times, until)})

    def usable(self, hosts: tuple[Host, ...], now: float) -> tuple[Host, ...]:
        """Returns the hosts that are not left out."""
        return tuple(host for host in hosts if host.name not in self.hosts or now >= self.hosts[host.name][2])


@dataclass(frozen=True)
class JobLoss:
    """What an elastic job has lost (``what``: a sentence, no full stop); ``cut``: host pairs that lost each other."""

    what: str
    hosts: frozenset[str] = frozenset()
    cut: frozenset[tuple[str, str]] = frozenset()
    started: bool = True


@dataclass(frozen=True)
class Tries:
    """A job's launches: restarts, those of the last that ended ``in_vain``, before all ranks started, and host pairs
    ``suspected`` to have lost each other since the last not in vain, or ``cut``: still apart later, one is left out.
    """

    restarts: int = 0
    in_vain: int = 0
    suspected: frozenset[tuple[str, str]] = frozenset()
    cut: frozenset[tuple[str, str]] = frozenset()

    def after(self, loss: JobLoss) -> Tries:
        """Returns the launches with one that has ended by ``loss``.
        A link that was down may be up again, so the first launch after it is on all hosts. One in vain tells only
        that some of its hosts are apart: those that were before, if they are among them, else any.
        """
        if loss.started:
            return replace(self, in_vain=0, suspected=loss.cut, cut=frozenset())
        hosts = {host for pair in loss.cut for host in pair}
        known = frozenset(pair for pair in self.suspected if hosts.issuperset(pair)) or loss.cut or self.suspected
        return replace(self, in_vain=self.in_vain + 1, suspected=known, cut=self.cut | known)


#: The hosts on which to start a job again; empty: as before.
Step = tuple[Host, ...]


def next_step(job: Job, elastic: Elastic, tries: Tries, hosts: tuple[Host, ...], waited: float) -> Step | str | None:
    """Returns how to start a job again after a loss, or a sentence, without its full stop, why not; ``None``: wait for
    hosts. ``job`` is as first started, ``hosts`` answer, ``waited`` is since the loss.

    >>> elastic = Elastic(least=2, most=4, timeout=60, resets=3)
    >>> job = Job(("train",), 4, (Host("a", 2), Host("b", 2)), elastic=elastic)
    >>> next_step(job, elastic, Tries(), (Host("b", 2),), waited=0)
    (Host(name='b', slots=2),)
    >>> next_step(job, elastic, Tries(), (), waited=0)
    >>> next_step(job, elastic, Tries(), (), waited=60)
    'after --elastic-timeout 60 s there are slots for 0 ranks, fewer than --min-np 2'
    >>> next_step(job, elastic, Tries(restarts=3), job.hosts, waited=0)
    '--reset-limit 3 allows no further start'
    """
    if elastic.resets is not None and tries.restarts >= elastic.resets:
        return f"--reset-limit {elastic.resets} allows no further start"
    if tries.in_vain >= FAILURES:
        return f"the last {tries.in_vain} starts have failed"
    if not job.hosts:
        return ()
    slots = total_slots(hosts)
    if slots >= elastic.least:
        return hosts
    if waited < elastic.timeout:
        return None
    return (
        f"after --elastic-timeout {elastic.timeout:g} s there are slots for {count_text(slots, 'rank')}, fewer "
        f"than --min-np {elastic.least}"
    )


def moved(job: Job, elastic: Elastic, hosts: tuple[Host, ...]) -> Step | None:
    """Returns how to start a running job, as last started, on the changed hosts; ``None``: it stays as it is. The slots
    that hosts of its ranks have had all along, it fills by itself.

    >>> job = Job(("train",), 2, (Host("a", 2),))
    >>> moved(job, Elastic(1, 4), (Host("a", 2), Host("b", 2)))
    (Host(name='a', slots=2), Host(name='b', slots=2))
    >>> moved(job, Elastic(1, 2), (Host("a", 2), Host("b", 2)))
    >>> moved(job, Elastic(1, 2), (Host("b", 2),))
    (Host(name='b', slots=2),)
    >>> moved(job, Elastic(1, 4), (Host("a", 2),)), moved(replace(job, size=1), Elastic(1, 4), (Host("a", 2),))
    (None, None)
    """
    used, there = Counter(hosts_of_ranks(job.hosts, job.size)), {host.name: host.slots for host in hosts}
    had = {host.name: host.slots for host in job.hosts if host.name in used}
    size = min(total_slots(hosts), elastic.most)
    stays = all(there.get(name, 0) >= count for name, count in used.items())
    grows = size > job.size and any(slots > had.get(name, 0) for name, slots in there.items())
    if size < elastic.least or (stays and not grows):
        return None
    return hosts


def restarted(job: Job, step: Step, number: int, own_names: Collection[str], environ: Mapping[str, str]) -> Job:
    """Returns the next job, on all slots that it may have, with a timeline of its own, so that earlier ones stay;
    faults are not injected again.

    >>> job = Job(("train",), 4, (Host("a", 2), Host("b", 2)))
    >>> again = restarted(job, (Host("b", 2),), 1, {"a"}, {"CHOROS_TIMELINE": "logs/run.json"})
    >>> again.size, again.remote, again.environment
    (2, (Host(name='b', slots=2),), {'CHOROS_RESTARTS': '1', 'CHOROS_TIMELINE': 'logs/run.restart1.json'})
    """
    variables = {name: value for name, value in job.environment.items() if name != VARIABLES["chaos"].name}
    variables[VARIABLES["restarts"].name] = str(number)
    if VARIABLES["chaos"].name in environ:
        variables[VARIABLES["chaos"].name] = ""
    name, timeline = VARIABLES["timeline"].given({**environ, **job.environment})
    if timeline and timeline != "DYNAMIC":
        path = Path(timeline)
        variables[name] = str(path.with_name(f"{path.stem}.restart{number}{path.suffix}"))
    hosts, size = step or job.hosts, min(total_slots(step), job.most) if step else job.size
    remote = tuple(host for host in hosts if host.name not in own_names)
    return replace(job, size=size, hosts=hosts, remote=remote, environment=variables)


def cut_off(hosts: Sequence[Host], cut: Collection[tuple[str, str]]) -> frozenset[str]:
    """Returns hosts to leave out until no pair is cut: the most cut one first, then the fewest slots, then the last.

    >>> cut_off((Host("a", 2), Host("b", 2), Host("c", 2)), {("a", "b"), ("b", "c")})
    frozenset({'b'})
    >>> cut_off((Host("a", 1), Host("b", 2)), {("a", "b")})
    frozenset({'a'})
    """
    out: frozenset[str] = frozenset()
    names = {host.name for host in hosts}
    pairs = {frozenset(pair) for pair in cut if set(pair) <= names}
    while pairs:
        count = Counter(name for pair in pairs for name in pair)
        worst = max(enumerate(hosts), key=lambda item: (count[item[1].name], -item[1].slots, item[0]))[1].name
        out |= {worst}
        pairs = {pair for pair in pairs if worst not in pair}
    return out
