"""Who waits for whom: a record of the ranks' waits, as they report them by events. Pure: times are arguments.

::

    rank 0   WAITING allreduce ── WAITING ── WAITING …       every few seconds, while it waits
    rank 1   WAITING allreduce ── WAITING ── WAITING …
    rank 2   ──────────── ended with code 0                  it will never call allreduce: ranks 0 and 1 are stuck

    rank 0   WAITING allreduce of the set {0, 1} …
    rank 1   WAITING allreduce of the set {1, 2} …           each waits for one that waits for another: all are stuck
    rank 2   WAITING allreduce of the set {2, 0} …

A wait can end if each of its ranks makes a call of the same set, or may still do so: because it computes, or because
its own wait can end. (Different calls of one set end, too, by a ``MismatchError``.) A rank is stuck if its wait cannot
end, which is believed only if the rank reports it once more a moment later: messages of different ranks may arrive in
any order.

A rank lingers if its script has ended, but not its process, and it does not wait itself: a handler at exit, a thread
that is no daemon or a destructor does not return. While another rank computes, it may take its time. If all ranks
linger, they may work: files are uploaded, threads train. That is shown, but the job is stopped only on request. When
the first of them ends, the others have as much time as if their scripts had ended then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from choros.config import STALL_SHUTDOWN_SECONDS
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.observe.events import INIT, LEAVING, SHUTDOWN, Event, Kind

__all__ = ["Stall", "Wait", "Waits"]

#: How long a rank must be stuck.
_CONFIRM_SECONDS = 1.0
#: A rank that lingers longer is shown.
_LINGER_SECONDS = 60.0
#: A rank that waits has reported it by then; until it does, it seems to linger.
_REPORT_SECONDS = 5.0
_LONGEST_CALL = 200
_ENDED = "ended with exit code 0"
_LINGERS = "a handler at exit, a thread that is no daemon or a library's destructor does not return"


@dataclass
class Wait:
    """The wait of one rank.

    Attributes:
        call: the call in which it waits.
        ranks: the ranks that must make it, this one among them.
        at: the line of the user's program; empty if it is not known.
        since: when it began.
        matched: whether all of them have made it: their data do not move.
        shown: whether it is part of a stall that was shown.
    """

    call: str
    ranks: frozenset[int]
    at: str
    since: float
    matched: bool = False
    shown: bool = False

    def __str__(self) -> str:
        call = self.call if len(self.call) <= _LONGEST_CALL else f"{self.call[:_LONGEST_CALL]}…"
        return f"{call} at {self.at}" if self.at else call


@dataclass(frozen=True)
class Stall:
    """A wait that is too long, or a rank that does not end.

    Attributes:
        text: who waits for whom, in which call.
        missing: the ranks that they wait for.
        since: when it began.
        matched: whether all have made the call; then all of them are missing.
    """

    text: str
    missing: tuple[int, ...]
    since: float
    matched: bool = False


@dataclass
class Waits:
    """The waits of all ranks of a job.

    Attributes:
        size: the number of ranks.
        exit_seconds: how long a rank may linger while others wait or have ended.
        exit_seconds_of_all: how long all ranks may linger; ``None``: without a limit.
        stall_seconds: how long a rank may wait before that is shown; 0: without a limit.
        stall_shutdown_seconds: how long a rank may wait before the job is stopped; 0: without a limit.
        elastic: MPI tells ranks that wait for one that has ended; they are not stuck, unless MPI has not started.
        roles: how the ranks are named.

    Example:
        >>> waits = Waits(2)
        >>> waits.ended(1, now=0.0)
        ''
        >>> waits.note(0, Event(Kind.WAITING, INIT, time=1.0), now=1.0)
        'rank 0 waits in init(), and rank 1 ended with exit code 0 before it called init()'
    """

    size: int
    exit_seconds: float = 300.0
    exit_seconds_of_all: float | None = None
    stall_seconds: float = 60.0
    stall_shutdown_seconds: float = 0.0
    elastic: bool = False
    roles: Roles = NO_ROLES
    _waits: dict[int, dict[str, Wait]] = field(default_factory=dict)
    _ended: dict[int, float] = field(default_factory=dict)
    _how: dict[int, str] = field(default_factory=dict)
    _added: set[int] = field(default_factory=set)
    _joined: set[int] = field(default_factory=set)
    _left: set[int] = field(default_factory=set)
    #: When the scripts of ranks ended, and those of which that was shown.
    _scripts: dict[int, float] = field(default_factory=dict)
    _shown: set[int] = field(default_factory=set)

    def note(self, rank: int, event: Event, now: float) -> str:
        """Records an event of ``rank``; returns why it is stuck, if it is."""
        waits = self._waits.setdefault(rank, {})
        if event.kind is Kind.WAITED:
            waits.pop(event.name, None)
            if event.name == LEAVING:
                self._left.add(rank)
        if event.kind is Kind.SCRIPT_ENDED:
            self._scripts[rank] = now
        elif event.name not in (SHUTDOWN, LEAVING):
            self._scripts.pop(rank, None)  # it goes on in another thread
        if event.kind is not Kind.WAITING:
            return ""
        if event.name == INIT:
            self._joined.add(rank)
        if event.name not in waits:
            members = self._members(event)
            if not members:
                return ""
            seconds = event.details.get("seconds", 0.0)
            since = now - (seconds if isinstance(seconds, int | float) else 0.0)
            at, matched = str(event.details.get("at", "")), bool(event.details.get("matched"))
            waits[event.name] = Wait(event.name, members, at, since, matched)
        return self._never_joined() or ("" if self.elastic else self._stuck(rank, event.time))

    def _members(self, event: Event) -> frozenset[int]:
        """Returns the ranks that must make the call of a wait; empty if they are not known."""
        ranks, matched = event.details.get("process_set"), event.details.get("matched")
        if isinstance(ranks, tuple | list):
            return frozenset(ranks)
        everyone = frozenset(range(self.size)) | self._added
        if not isinstance(matched, int):  # the list was too long to send
            return everyone
        running = everyone.difference(self._ended if self.elastic else self._left)
        return running if len(running) <= matched else frozenset()  # a call of a process set

    def forget(self, rank: int) -> None:
        """Forgets what is known of a rank whose place another one has taken."""
        for known in (self._waits, self._ended, self._scripts):
            known.pop(rank, None)
        self._left.discard(rank)
        self._added.add(rank)

    def ended(self, rank: int, now: float, how: str = _ENDED) -> str:
        """Records that ``rank`` ended; returns which rank is stuck for certain, if there is one."""
        self._ended[rank] = now
        self._how[rank] = how
        self._waits.pop(rank, None)
        if self.elastic:  # the others recover, and go on
            for wait in (wait for waits in self._waits.values() for wait in waits.values() if rank in wait.ranks):
                wait.since = now
        return self._never_joined()

    def connecting(self) -> bool:
        """Whether all ranks have come to ``init()``, and none has left it: MPI connects them."""
        current = self._current()
        return len(current) == self.size and all(wait.call == INIT for wait in current.values())

    @property
    def only_leave(self) -> bool:
        """Whether all scripts have ended, and ranks wait to leave the job only for one that has ended without that."""
        current = self._current()
        calls = {wait.call for wait in current.values()}
        resting = len(current.keys() | self._ended.keys()) >= self.size
        scripts_ended = calls == {LEAVING} or len(self._scripts) >= self.size
        return resting and scripts_ended and calls <= {SHUTDOWN, LEAVING} and bool(self._ended.keys() - self._left)

    def stalls(self, now: float) -> list[Stall]:
        """Returns the stalls that were not shown so far; who waits later in the same call is part of its stall."""
        stalls = []
        for same in self._calls() if self._report_seconds else ():
            if self._stalled_since(same) <= now - self._report_seconds:
                was_shown = any(wait.shown for wait in same.values())
                stalls += [] if was_shown else [self._stall(same, now, self._report_seconds)]
                for wait in same.values():
                    wait.shown = True
        lingering = [rank for rank in self._lingering(now - _LINGER_SECONDS) if rank not in self._shown]
        self._shown.update(lingering)
        advice = "" if self._resting() else ". Ctrl-C ends the job, as does --exit-timeout after its time"
        for rank in lingering:
            ended = self._scripts[rank]
            text = f"{self._names([rank])} has not ended, {now - ended:.0f} s after its script: {_LINGERS}{advice}"
            stalls.append(Stall(text, (rank,), ended))
        return stalls

    def doing(self, rank: int) -> str:
        """Returns what ``rank`` does, as far as it has reported it."""
        wait = self._current().get(rank)
        if rank in self._ended:
            return _ENDED
        if wait is not None:
            return f"is in {wait}" if wait.matched else f"waits itself in {wait}"
        return "has ended its script" if rank in self._scripts else ""

    @property
    def _report_seconds(self) -> float:
        """After how many seconds a wait is shown: before it ends the job."""
        limits = [self.stall_seconds] + ([self.stall_shutdown_seconds] if self.stall_shutdown_seconds else [])
        return min(limits)

    def too_long(self, now: float) -> str:
        """Returns which ranks have waited or lingered for too long, if there are such."""
        stalls, limit = self._overdue(now), self.stall_shutdown_seconds
        return (
            f"{stalls[0].text}, longer than {STALL_SHUTDOWN_SECONDS.name}={limit:g}" if stalls else self._lingers(now)
        )

    def culprits(self, now: float, stopped: Collection[int]) -> list[int]:
        """Returns the ranks without which the waits that are too long could end.

        Args:
            now: the time.
            stopped: the ranks that are stopped by a signal: if all have made a call, its data move without these.
        """
        found: set[int] = set()
        for stall in self._overdue(now):
            found.update(set(stall.missing).intersection(stopped) if stall.matched else stall.missing)
        return sorted(found - self._resting().difference(stopped) - self._ended.keys())

    def _overdue(self, now: float) -> list[Stall]:
        """Returns the stalls for which the job is stopped."""
        limit = self.stall_shutdown_seconds
        calls = self._calls() if limit else []
        return [self._stall(same, now, limit) for same in calls if self._stalled_since(same) <= now - limit]

    def _lingers(self, now: float) -> str:
        limit = self._exit_limit()
        ranks = [] if limit is None else self._lingering(now - limit)
        if not ranks:
            return ""
        return f"{self._names(ranks)} did not end within --exit-timeout {limit:g} s after the script: {_LINGERS}"

    def next_stall(self, now: float) -> float | None:
        """Returns the seconds until ``stalls`` or ``too_long`` may return something; ``None`` if nothing stalls."""
        report, limit = self._report_seconds, self.stall_shutdown_seconds
        ends: list[float] = []
        for same in self._calls():
            since = self._stalled_since(same)
            ends += [since + report] if report and not any(wait.shown for wait in same.values()) else []
            ends += [since + limit] if limit else []
        lingering = self._lingering(now)
        if lingering:
            last, exit_limit = max(map(self._began_to_linger, lingering)), self._exit_limit()
            ends += [last + exit_limit] if exit_limit is not None else []
            ends += [] if self._shown.issuperset(lingering) else [last + _LINGER_SECONDS]
        return min((max(0.0, end - now) for end in ends), default=None)

    def _lingering(self, ended_before: float) -> list[int]:
        """Returns the ranks that linger and whose scripts ended before; none while another rank computes."""
        resting = self._resting()
        lingering = {rank for rank in self._scripts.keys() - resting if self._began_to_linger(rank) <= ended_before}
        return sorted(lingering) if lingering | resting == set(range(self.size)) else []

    def _began_to_linger(self, rank: int) -> float:
        """Returns when the script of ``rank`` ended, or, if that was later, the last of the other ranks."""
        return max([self._scripts[rank], *self._ended.values()])

    def _resting(self) -> set[int]:
        """Returns the ranks that wait or have ended."""
        return self._current().keys() | self._ended.keys()

    def _exit_limit(self) -> float | None:
        """Returns how long ranks may linger; ``None`` if there is no limit."""
        if self._resting():
            return self.exit_seconds
        return None if self.exit_seconds_of_all is None else max(self.exit_seconds_of_all, _REPORT_SECONDS)

    def lines(self, now: float) -> list[str]:
        """Returns lines about all waits that are explained, or too long."""
        limit = now - self._report_seconds
        told = (same for same in self._calls() if self._explained(same) or self._stalled_since(same) <= limit)
        return [self._stall(same, now, 0.0).text for same in told]

    def _current(self) -> dict[int, Wait]:
        """The innermost wait of each rank that waits."""
        return {rank: list(waits.values())[-1] for rank, waits in sorted(self._waits.items()) if waits}

    def _never_joined(self) -> str:
        """Returns which rank waits in ``init()`` for one that ended before: MPI's own start cannot report again."""
        for rank, wait in self._current().items():
            absent = sorted((self._ended.keys() - self._joined) & wait.ranks)
            if wait.call == INIT and absent and rank not in self._added:
                how = self._how[absent[0]]
                return f"{self._names([rank])} waits in {wait}, and {self._names(absent)} {how} before it called init()"
        return ""

    def _stuck(self, rank: int, seen: float) -> str:
        """Returns why ``rank``, which still waited at the time ``seen``, is stuck; empty if its wait can end."""
        waits = self._current()
        gone = self._ended.keys() - self._left
        if not gone and len({wait.ranks for wait in waits.values()}) == 1:
            return ""
        free = set(range(self.size)) - waits.keys() - gone
        while more := {one for one, wait in waits.items() if one not in free and _can_end(wait, waits, free)}:
            free |= more
        stuck = {one: wait for one, wait in waits.items() if one not in free}
        times = [wait.since for wait in stuck.values()] + [self._ended[one] for one in gone]
        if rank not in stuck or seen < max(times) + _CONFIRM_SECONDS:
            return ""
        if missing := sorted(waits[rank].ranks & gone):
            return (
                f"{self._names([rank])} waits in {waits[rank]}, and {self._names(missing)} {_ENDED} without leaving "
                "the job, as os._exit() does"
            )
        return "ranks wait for each other: " + "; ".join(
            f"{self._names([one])} in {wait}" for one, wait in stuck.items()
        )

    def _names(self, ranks: Iterable[int]) -> str:
        return self.roles.names(list(ranks))

    def _calls(self) -> list[dict[int, Wait]]:
        """The waits of all ranks, those in the same call together."""
        calls: dict[tuple[str, frozenset[int]], dict[int, Wait]] = {}
        for rank, wait in self._current().items():
            calls.setdefault((wait.call, wait.ranks), {})[rank] = wait
        return list(calls.values())

    def _missing(self, same: dict[int, Wait]) -> set[int]:
        """The ranks that have not made the call of these waits; none if its data move."""
        wait = next(iter(same.values()))
        here = {rank for rank, other in self._current().items() if other.call == wait.call}
        return set() if any(each.matched for each in same.values()) else set(wait.ranks - here)

    def _stalled_since(self, same: dict[int, Wait]) -> float:
        """Since when the first of these ranks has waited; the last one, if nothing explains it, as all have come."""
        times = [wait.since for wait in same.values()]
        return min(times) if self._explained(same) else max(times)

    def _explained(self, same: dict[int, Wait]) -> bool:
        """Whether it is known what these waits wait for: other ranks, or data that move."""
        return bool(self._missing(same)) or any(wait.matched for wait in same.values())

    def _stall(self, same: dict[int, Wait], now: float, limit: float) -> Stall:
        """Returns the stall of waits in the same call, which names those that have lasted for ``limit`` seconds."""
        missing, since = sorted(self._missing(same)), self._stalled_since(same)
        longest = min(same.values(), key=lambda wait: wait.since)
        seconds = f"{now - since:.0f} s"
        if missing:
            waiting = [rank for rank, wait in same.items() if wait.since <= now - limit]
            has = "has" if len(waiting) == 1 else "have"
            text = f"{self._names(waiting)} {has} waited {seconds} for {self._names(missing)} in {longest}"
            return Stall(text, tuple(missing), since)
        members = sorted(longest.ranks)
        has = "has" if len(members) == 1 else "have"
        text = f"{self._names(members)} {has} been in {longest} for {seconds}, and it does not end"
        return Stall(text, tuple(members), since, matched=True)


def _can_end(wait: Wait, waits: dict[int, Wait], free: set[int]) -> bool:
    return all(rank in free or (rank in waits and waits[rank].ranks == wait.ranks) for rank in wait.ranks)
