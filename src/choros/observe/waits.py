"""Who waits for whom: a record of the ranks' waits, as they report them by events. Pure: times are arguments.
chorosrun reads them from its pipes; where it did not start the ranks, ``comm/store_watch.py`` asks rank 0's store.

::

    rank 0   WAITING allreduce ── WAITING ── WAITING …       every few seconds, while it waits
    rank 1   WAITING allreduce ── WAITING ── WAITING …
    rank 2   ──────────── ended with code 0                  it will never call allreduce: ranks 0 and 1 are stuck

    rank 0   WAITING allreduce of the set {0, 1} …
    rank 1   WAITING allreduce of the set {1, 2} …           each waits for one that waits for another: all are stuck
    rank 2   WAITING allreduce of the set {2, 0} …

A wait can end if each of its ranks calls the same set or still may: it computes, or its own wait can end. A rank
is stuck if not, and it reports that once more a moment later, as messages of ranks arrive in any order. It lingers
if its script has ended, but not its process; if all do, they may work: that is shown, and stopped only on request.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from choros import durations
from choros.observe.events import INIT, LEAVING, SHUTDOWN, Event, Kind
from choros.wording import ranks_text

_LONGEST_CALL = 200
_ENDED = "ended with exit code 0"
_LINGERS = "a handler at exit, a thread that is no daemon or a library's destructor does not return"


@dataclass
class Wait:
    """The wait of one rank in ``call``; ``matched``: all of ``ranks`` have made it, and their data do not move."""

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
    """A wait that is too long, or a rank that does not end; ``matched``: all made the call, so all are ``missing``."""

    text: str
    missing: tuple[int, ...]
    since: float
    matched: bool = False


@dataclass(frozen=True)
class SameCall:
    """The waits of all ranks that are in the same call, and the ranks that have not made it; none if its data move."""

    waits: Mapping[int, Wait]
    missing: frozenset[int]

    @property
    def since(self) -> float:
        """Since when the first of these ranks has waited; the last one, if nothing explains it, as all have come."""
        times = [wait.since for wait in self.waits.values()]
        return min(times) if self.is_explained else max(times)

    @property
    def is_explained(self) -> bool:
        """Whether it is known what these waits wait for: other ranks, or data that move."""
        return bool(self.missing) or any(wait.matched for wait in self.waits.values())

    @property
    def was_shown(self) -> bool:
        """Whether one of these waits was shown."""
        return any(wait.shown for wait in self.waits.values())

    def stall(self, name: Callable[[Sequence[int]], str], now: float, limit: float) -> Stall:
        """Returns the stall, which names the ranks that have waited for ``limit`` seconds."""
        longest = min(self.waits.values(), key=lambda wait: wait.since)
        seconds, missing = f"{now - self.since:.0f} s", sorted(self.missing or longest.ranks)
        if self.missing:
            waiting = [rank for rank, wait in self.waits.items() if wait.since <= now - limit]
            what = f"waited {seconds} for {name(missing)} in {longest}"
        else:
            waiting, what = missing, f"been in {longest} for {seconds}, and it does not end"
        text = f"{name(waiting)} {'has' if len(waiting) == 1 else 'have'} {what}"
        return Stall(text, tuple(missing), self.since, matched=not self.missing)


@dataclass
class Waits:
    """The waits of all ranks of a job; in an elastic one MPI, once started, tells ranks that another has ended.

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
    name: Callable[[Sequence[int]], str] = ranks_text
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
            everyone = frozenset(range(self.size)) | self._added
            members = _members(event, everyone, everyone.difference(self._ended if self.elastic else self._left))
            if not members:
                return ""
            seconds = event.details.get("seconds", 0.0)
            since = now - (seconds if isinstance(seconds, int | float) else 0.0)
            at, matched = str(event.details.get("at", "")), bool(event.details.get("matched"))
            waits[event.name] = Wait(event.name, members, at, since, matched)
        return self._never_joined() or ("" if self.elastic else self._stuck(rank, event.time))

    def forget(self, rank: int) -> None:
        """Forgets what is known of a rank whose place another one has taken."""
        for known in (self._waits, self._ended, self._scripts):
            known.pop(rank, None)
        self._left.discard(rank)
        self._shown.discard(rank)
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
        current = self.current()
        return len(current) == self.size and all(wait.call == INIT for wait in current.values())

    @property
    def only_leave(self) -> bool:
        """Whether all scripts have ended, and ranks wait to leave the job only for one that has ended without that."""
        current = self.current()
        calls = {wait.call for wait in current.values()}
        resting = len(current.keys() | self._ended.keys()) >= self.size
        scripts_ended = calls == {LEAVING} or len(self._scripts) >= self.size
        return resting and scripts_ended and calls <= {SHUTDOWN, LEAVING} and bool(self._ended.keys() - self._left)

    def stalls(self, now: float) -> list[Stall]:
        """Returns the stalls that were not shown so far; who waits later in the same call is part of its stall."""
        stalls = []
        for call in self._overdue(now, self._report_seconds):
            stalls += [] if call.was_shown else [call.stall(self.name, now, self._report_seconds)]
            for wait in call.waits.values():
                wait.shown = True
        lingering = [rank for rank in self._lingering(now - durations.LINGER) if rank not in self._shown]
        self._shown.update(lingering)
        advice = "" if self._resting() else ". Ctrl-C ends the job, as does --exit-timeout after its time"
        for rank in lingering:
            ended = self._scripts[rank]
            text = f"{self.name([rank])} has not ended, {now - ended:.0f} s after its script: {_LINGERS}{advice}"
            stalls.append(Stall(text, (rank,), ended))
        return stalls

    def doing(self, rank: int) -> str:
        """Returns what ``rank`` does, as far as it has reported it."""
        wait = self.current().get(rank)
        if rank in self._ended:
            return self._how[rank]
        if wait is not None:
            return f"is in {wait}" if wait.matched else f"waits itself in {wait}"
        return "has ended its script" if rank in self._scripts else ""

    @property
    def _report_seconds(self) -> float:
        """After how many seconds a wait is shown: before it ends the job."""
        return min(self.stall_seconds, self.stall_shutdown_seconds or self.stall_seconds)

    def too_long(self, now: float) -> str:
        """Returns which ranks have waited or lingered for too long, if there are such."""
        limit = self.stall_shutdown_seconds
        if calls := self._overdue(now, limit):
            text = calls[0].stall(self.name, now, limit).text
            return f"{text}, longer than CHOROS_STALL_SHUTDOWN_SECONDS={limit:g}"
        limit_of_exit = self._exit_limit()
        ranks = [] if limit_of_exit is None else self._lingering(now - limit_of_exit)
        if not ranks:
            return ""
        return f"{self.name(ranks)} did not end within --exit-timeout {limit_of_exit:g} s after the script: {_LINGERS}"

    def culprits(self, now: float, stopped: Collection[int]) -> list[int]:
        """Returns the ranks without which the waits that are too long could end.
        If all have made a call, its data do not move because of those among them that a signal has ``stopped``.
        """
        found: set[int] = set()
        limit = self.stall_shutdown_seconds
        for call in self._overdue(now, limit):
            stall = call.stall(self.name, now, limit)
            found.update(set(stall.missing).intersection(stopped) if stall.matched else stall.missing)
        return sorted(found - self._resting().difference(stopped) - self._ended.keys())

    def _overdue(self, now: float, limit: float) -> list[SameCall]:
        """The calls whose waits are longer than ``limit``; none if that is 0."""
        return [call for call in self._calls() if limit and call.since <= now - limit]

    def next_stall(self, now: float) -> float | None:
        """Returns the seconds until ``stalls`` or ``too_long`` may return something; ``None`` if nothing stalls."""
        report, limit = self._report_seconds, self.stall_shutdown_seconds
        ends: list[float] = []
        for call in self._calls():
            ends += [call.since + report] if report and not call.was_shown else []
            ends += [call.since + limit] if limit else []
        lingering = self._lingering(now)
        if lingering:
            last = max(*(self._scripts[rank] for rank in lingering), *self._ended.values(), 0.0)
            exit_limit = self._exit_limit()
            ends += [last + exit_limit] if exit_limit is not None else []
            ends += [] if self._shown.issuperset(lingering) else [last + durations.LINGER]
        return min((max(0.0, end - now) for end in ends), default=None)

    def _lingering(self, ended_before: float) -> list[int]:
        """Returns the ranks that linger and whose scripts ended before; none while another rank computes."""
        resting, last_end = self._resting(), max(self._ended.values(), default=0.0)
        lingering = {rank for rank in self._scripts.keys() - resting if self._scripts[rank] <= ended_before}
        if last_end > ended_before:  # they linger since then
            return []
        return sorted(lingering) if lingering | resting == set(range(self.size)) else []

    def _resting(self) -> set[int]:
        """Returns the ranks that wait or have ended."""
        return self.current().keys() | self._ended.keys()

    def _exit_limit(self) -> float | None:
        """Returns how long ranks may linger; ``None`` if there is no limit."""
        if self._resting():
            return self.exit_seconds
        return None if self.exit_seconds_of_all is None else max(self.exit_seconds_of_all, durations.WAIT_REPORT)

    def lines(self, now: float) -> list[str]:
        """Returns lines about all waits that are explained, or too long."""
        limit = now - self._report_seconds
        due = (call for call in self._calls() if call.is_explained or call.since <= limit)
        return [call.stall(self.name, now, 0.0).text for call in due]

    def current(self) -> dict[int, Wait]:
        """The innermost wait of each rank that waits."""
        return {rank: list(waits.values())[-1] for rank, waits in sorted(self._waits.items()) if waits}

    def _never_joined(self) -> str:
        """Returns which rank waits in ``init()`` for one that ended before: MPI's own start cannot report again."""
        for rank, wait in self.current().items():
            absent = sorted((self._ended.keys() - self._joined) & wait.ranks)
            if wait.call == INIT and absent and rank not in self._added:
                how = self._how[absent[0]]
                return f"{self.name([rank])} waits in {wait}, and {self.name(absent)} {how} before it called init()"
        return ""

    def _stuck(self, rank: int, seen: float) -> str:
        """Returns why ``rank``, which still waited at the time ``seen``, is stuck; empty if its wait can end."""
        waits = self.current()
        gone = self._ended.keys() - self._left
        if not gone and len({wait.ranks for wait in waits.values()}) == 1:
            return ""
        free = set(range(self.size)) - waits.keys() - gone
        while more := {one for one, wait in waits.items() if one not in free and _can_end(wait, waits, free)}:
            free |= more
        stuck = {one: wait for one, wait in waits.items() if one not in free}
        times = [wait.since for wait in stuck.values()] + [self._ended[one] for one in gone]
        if rank not in stuck or seen < max(times) + durations.CONFIRM:
            return ""
        if missing := sorted(waits[rank].ranks & gone):
            return (
                f"{self.name([rank])} waits in {waits[rank]}, and {self.name(missing)} {_ENDED} without leaving "
                "the job, as os._exit() does"
            )
        return "ranks wait for each other: " + "; ".join(f"{self.name([one])} in {wait}" for one, wait in stuck.items())

    def _calls(self) -> list[SameCall]:
        """The waits of all ranks, those in the same call together."""
        current, calls = self.current(), dict[tuple[str, frozenset[int]], dict[int, Wait]]()
        for rank, wait in current.items():
            calls.setdefault((wait.call, wait.ranks), {})[rank] = wait
        found = []
        for (name, ranks), waits in calls.items():
            here = {rank for rank, wait in current.items() if wait.call == name}
            matched = any(wait.matched for wait in waits.values())
            found.append(SameCall(waits, frozenset() if matched else ranks - here))
        return found


def _members(event: Event, everyone: frozenset[int], running: frozenset[int]) -> frozenset[int]:
    """Returns the ranks that must make the call of a wait; empty if they are not known."""
    ranks, matched = event.details.get("process_set"), event.details.get("matched")
    if isinstance(ranks, tuple | list):
        return frozenset(ranks)
    if not isinstance(matched, int):  # the list was too long to send
        return everyone
    return running if len(running) <= matched else frozenset()  # a call of a process set


def _can_end(wait: Wait, waits: dict[int, Wait], free: set[int]) -> bool:
    return all(rank in free or (rank in waits and waits[rank].ranks == wait.ranks) for rank in wait.ranks)
