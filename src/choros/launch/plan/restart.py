"""What chorosrun does after an elastic job has lost mpirun, a host or a link: restart it, wait for hosts, or end. Pure.

::

    launch ──► its end ──► a loss? ── no ─────────────────────────────────────► the job's outcome
       ▲                      │ yes
       │                      ▼
       │        ┌──────── next_step ──┬─ End: --reset-limit, --elastic-timeout ─► exit code 69
       │        │             ▲       └─ WaitForHosts ───┐
       │     Restart          └──────── one second ──────┘
       └────────┘  on the hosts that are left, from the last commit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from choros.config import CHAOS, RESTARTS, TIMELINE
from choros.launch.plan.discovery import FAILURES
from choros.launch.plan.elastic import Elastic
from choros.launch.plan.hosts import Host, hosts_of_ranks, total_slots
from choros.launch.plan.job import Job

__all__ = ["End", "JobLoss", "Restart", "WaitForHosts", "cut_off", "moved", "next_step", "restarted"]


@dataclass(frozen=True)
class JobLoss:
    """What an elastic job has lost, without which it cannot go on in place.

    Attributes:
        what: a sentence that says so, without its full stop.
        hosts: the names of lost hosts.
        cut: pairs of hosts that have lost each other.
        started: whether all ranks had started.
    """

    what: str
    hosts: frozenset[str] = frozenset()
    cut: frozenset[tuple[str, str]] = frozenset()
    started: bool = True


@dataclass(frozen=True)
class Restart:
    """Start the job again.

    Attributes:
        size: its number of ranks.
        hosts: its hosts; empty: as before.
    """

    size: int
    hosts: tuple[Host, ...] = ()


@dataclass(frozen=True)
class WaitForHosts:
    """Wait for hosts with slots for enough ranks.

    Attributes:
        slots: those that there are.
    """

    slots: int


@dataclass(frozen=True)
class End:
    """Do not start the job again.

    Attributes:
        why: a sentence, without its full stop.
    """

    why: str


@dataclass(frozen=True)
class Tries:
    """The launches of a job so far.

    Attributes:
        restarts: how many times it was started again.
        in_vain: how many of the last launches ended before all ranks had started.
        suspected: pairs of hosts that have lost each other since the last launch that was not in vain.
        cut: those of them that still were apart in a later launch: one of two is left out.
    """

    restarts: int = 0
    in_vain: int = 0
    suspected: frozenset[tuple[str, str]] = frozenset()
    cut: frozenset[tuple[str, str]] = frozenset()

    def after(self, loss: JobLoss) -> Tries:
        """Returns the launches with one that has ended by ``loss``.

        A link that was down may be up again: the first launch after it is made on all hosts. A launch in vain tells
        only that some of its hosts are apart: those that were before, if they are among them, else any.
        """
        if loss.started:
            return replace(self, in_vain=0, suspected=loss.cut, cut=frozenset())
        hosts = {host for pair in loss.cut for host in pair}
        known = frozenset(pair for pair in self.suspected if hosts.issuperset(pair)) or loss.cut or self.suspected
        return replace(self, in_vain=self.in_vain + 1, suspected=known, cut=self.cut | known)


def next_step(
    job: Job, elastic: Elastic, tries: Tries, hosts: tuple[Host, ...], waited: float
) -> Restart | WaitForHosts | End:
    """Returns what to do after a loss.

    Args:
        job: the job as it was started first.
        elastic: its bounds.
        tries: its launches so far.
        hosts: the hosts that answer, and are not left out.
        waited: for how many seconds it has waited for hosts since the loss.

    Example:
        >>> elastic = Elastic(least=2, most=4, timeout=60, resets=3)
        >>> job = Job(("train",), 4, (Host("a", 2), Host("b", 2)), elastic=elastic)
        >>> next_step(job, elastic, Tries(), (Host("b", 2),), waited=0)
        Restart(size=2, hosts=(Host(name='b', slots=2),))
        >>> next_step(job, elastic, Tries(), (), waited=0)
        WaitForHosts(slots=0)
        >>> next_step(job, elastic, Tries(), (), waited=60)
        End(why='after --elastic-timeout 60 s there are slots for 0 ranks, fewer than --min-np 2')
        >>> next_step(job, elastic, Tries(restarts=3), job.hosts, waited=0)
        End(why='--reset-limit 3 allows no further start')
    """
    if elastic.resets is not None and tries.restarts >= elastic.resets:
        return End(f"--reset-limit {elastic.resets} allows no further start")
    if tries.in_vain >= FAILURES:
        return End(f"the last {tries.in_vain} starts have failed")
    if not job.hosts:
        return Restart(job.size)
    slots = total_slots(hosts)
    if slots >= elastic.least:
        return Restart(min(slots, elastic.most), hosts)
    if waited < elastic.timeout:
        return WaitForHosts(slots)
    return End(
        f"after --elastic-timeout {elastic.timeout:g} s there are slots for {slots} rank{'s' * (slots != 1)}, fewer "
        f"than --min-np {elastic.least}"
    )


def moved(job: Job, elastic: Elastic, hosts: tuple[Host, ...]) -> Restart | None:
    """Returns how a running job is to be started again because its hosts have changed; ``None``: it stays as it is.

    Args:
        job: the job as it was started last.
        elastic: its bounds.
        hosts: the hosts that there are now.

    Example:
        >>> job = Job(("train",), 2, (Host("a", 2),))
        >>> moved(job, Elastic(1, 4), (Host("a", 2), Host("b", 2)))
        Restart(size=4, hosts=(Host(name='a', slots=2), Host(name='b', slots=2)))
        >>> moved(job, Elastic(1, 2), (Host("a", 2), Host("b", 2)))
        >>> moved(job, Elastic(1, 2), (Host("b", 2),))
        Restart(size=2, hosts=(Host(name='b', slots=2),))
    """
    used, there = Counter(hosts_of_ranks(job.hosts, job.size)), {host.name: host.slots for host in hosts}
    size = min(total_slots(hosts), elastic.most)
    stays = all(there.get(name, 0) >= count for name, count in used.items())
    if size < elastic.least or (stays and size <= job.size):
        return None
    return Restart(size, hosts)


def restarted(job: Job, step: Restart, number: int, own_names: Collection[str], environ: Mapping[str, str]) -> Job:
    """Returns the job that is started next.

    Args:
        job: the job as it was started first.
        step: its ranks and hosts now.
        number: how many times it is started again.
        own_names: this machine's names.
        environ: the user's environment.

    Its timeline gets a name of its own, so that those before are kept; faults are not injected again.

    Example:
        >>> job = Job(("train",), 4, (Host("a", 2), Host("b", 2)))
        >>> again = restarted(job, Restart(2, (Host("b", 2),)), 1, {"a"}, {"CHOROS_TIMELINE": "logs/run.json"})
        >>> again.size, again.remote, again.environment
        (2, (Host(name='b', slots=2),), {'CHOROS_RESTARTS': '1', 'CHOROS_TIMELINE': 'logs/run.restart1.json'})
    """
    variables = {name: value for name, value in job.environment.items() if name != CHAOS.name}
    variables[RESTARTS.name] = str(number)
    if CHAOS.name in environ:
        variables[CHAOS.name] = ""
    name, timeline = TIMELINE.given({**environ, **job.environment})
    if timeline and timeline != "DYNAMIC":
        path = Path(timeline)
        variables[name] = str(path.with_name(f"{path.stem}.restart{number}{path.suffix}"))
    hosts = step.hosts or job.hosts
    remote = tuple(host for host in hosts if host.name not in own_names)
    return replace(job, size=step.size, hosts=hosts, remote=remote, environment=variables)


def cut_off(hosts: Sequence[Host], cut: Collection[tuple[str, str]]) -> frozenset[str]:
    """Returns the hosts to leave out so that no two of the others have lost each other.

    That which has lost most; of several, that with the fewest slots, the last one of them.

    Example:
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
