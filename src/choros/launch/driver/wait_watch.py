"""The watch over ranks that wait: shows stalls, and ends a job, or ranks of an elastic one, that cannot go on.

::

    events of the ranks ──► Waits (``observe/waits.py``, pure) ── too long? ──► stacks of those that are missing
                                 │                                                        │
                                 ▼ stuck?                                                 ▼
                             the job is stopped                              a report

All wrappers are asked for stacks by one signal, and answer by frames; the ranks take no part, as they may be stopped.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from choros import durations
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.mpirun_process import MpirunProcess
from choros.launch.driver.output import Output
from choros.launch.plan.job import Limits
from choros.launch.processes.control import send_text
from choros.launch.protocol.frames import Stacks, Start
from choros.observe.events import Event
from choros.observe.processes import STOPPED, stopped_above
from choros.observe.progress import RankProgress
from choros.observe.verdict import Stragglers, last_lines
from choros.observe.waits import Stall, Waits
from choros.transport.loop import Loop

if TYPE_CHECKING:
    import socket

#: A report names all ranks that are missing, and shows the stacks of the first ones.
_MOST_STACKS = 8


@dataclass(eq=False)
class StackRequests:
    """Collects the answers of each request, which ``send`` makes to all wrappers; ``None``: this mpirun cannot."""

    loop: Loop
    send: Callable[[], None] | None
    _requests: dict[str, tuple[Collection[int], Callable[[Mapping[int, Stacks]], None], dict[int, Stacks]]] = field(
        default_factory=dict
    )
    _asked: int = 0

    @property
    def pending(self) -> bool:
        """Whether a request has not been answered."""
        return bool(self._requests)

    def ask(self, ranks: Collection[int], then: Callable[[Mapping[int, Stacks]], None]) -> None:
        """Asks for the stacks of ``ranks``; calls ``then`` when all have answered, or with what there is in time."""
        if self.send is None or not ranks:
            then({})
            return
        self._asked += 1
        name = f"stacks {self._asked}"
        self._requests[name] = (ranks, then, {})
        self.loop.set_deadline(name, durations.STACKS_OF_ALL, partial(self._end, name))
        self.send()

    def note(self, answer: Stacks) -> None:
        """Receives an answer."""
        for name, (ranks, _, answers) in list(self._requests.items()):
            answers[answer.rank] = answer
            if answers.keys() >= set(ranks):
                self._end(name)

    def _end(self, name: str) -> None:
        self.loop.cancel(name)
        _, then, answers = self._requests.pop(name)
        then(answers)


@dataclass(eq=False)
class WaitWatch:
    """Knows what the ranks wait for; ``stop`` ends the job, ``kill`` a rank, and ``stacks`` asks for their stacks.
    ``killed``: the ranks that were killed because others waited for them too long.
    """

    job_end: JobEnd
    output: Output
    loop: Loop
    mpirun: MpirunProcess
    limits: Limits
    stacks: StackRequests
    stop: Callable[[Reason], None]
    kill: Callable[[int], None]
    killed: set[int] = field(default_factory=set)
    _progress: dict[int, RankProgress] = field(default_factory=dict)
    _connects: bool = False

    def __post_init__(self) -> None:
        size, limits, name = self.job_end.size, self.limits, self.job_end.roles.names
        times = (limits.exit, limits.exit_of_all, limits.stall, limits.stall_shutdown)
        self._waits = Waits(size, *times, elastic=self.job_end.elastic is not None, name=name)
        self._stragglers = Stragglers(size, name)
        self._began = time.time()

    def lines(self) -> list[str]:
        """Returns lines about who waits for whom."""
        return self._waits.lines(time.time())

    def note(self, rank: int, event: Event) -> None:
        """Records an event of ``rank``."""
        stuck = self._waits.note(rank, event, time.time())
        if stuck and self.job_end.is_saving:
            self.kill(rank)  # it waits for one that has ended: it saves nothing
        self._check_stuck(stuck)
        self._plan_stalls()
        self._plan_connection()

    def note_progress(self, frame: RankProgress) -> None:
        """Records what a rank has done."""
        self._progress[frame.rank] = frame
        if frame.rank not in self.job_end.exits and (sentence := self._stragglers.note(frame)):
            self.output.show(f"chorosrun: {sentence}.")

    def replaced(self, rank: int) -> None:
        """Forgets what is known of a rank whose place another one has taken."""
        self.killed.discard(rank)
        self._waits.forget(rank)

    def ended(self, rank: int, *how: str) -> None:
        """Records the end of a rank, for which others may wait; ``how`` it ended, if not with 0."""
        self._check_stuck(self._waits.ended(rank, time.time(), *how))
        self._plan_stalls()

    def finish(self) -> None:
        """Shows where the time of the job went."""
        if self.job_end.reason is None:
            for line in last_lines(self._stragglers, self._began, time.time(), verdict=self.limits.verdict):
                self.output.show(f"chorosrun: {line}")

    def _check_stuck(self, stuck: str) -> None:
        if stuck and self.job_end.reason is None:
            self.job_end.stuck = stuck
            self.stop(Reason.OVER if self._waits.only_leave else Reason.STUCK)

    def _plan_connection(self) -> None:
        """Schedules the end of a job that MPI never starts though all came; an elastic one goes on on one host."""
        if not self._waits.connecting() or self.job_end.reason is not None:
            self.loop.cancel("connection")
            self._connects = False
        elif not self._connects:
            self._connects = True
            several = self.job_end.elastic is not None and len(self.job_end.hosts) > 1
            seconds = durations.CONNECT if several else self.limits.start
            self.loop.set_deadline("connection", seconds, partial(self._on_unconnected, seconds, several))

    def _on_unconnected(self, seconds: float, several: bool) -> None:
        self.job_end.unconnected = several
        hosts = self.job_end.hosts
        cause = (
            f"the hosts {', '.join(sorted(hosts))} must reach each other's TCP ports. --network-interfaces selects a "
            "network"
            if len(hosts) > 1
            else "MPI_Init does not return"
        )
        for user in self.mpirun.strangers():
            cause += f"; a process of another user (uid {user}) is connected to mpirun, which may wait for it"
        self._check_stuck(f"all ranks have called init(), and are not connected after {seconds:g} s: {cause}")

    def _plan_stalls(self) -> None:
        ending = not self.killed <= self.job_end.exits.keys() or not self.job_end.missing
        goes_on = not ending and self.job_end.reason is None
        self.loop.set_deadline("stall", self._waits.next_stall(time.time()) if goes_on else None, self._show_stalls)

    def _show_stalls(self) -> None:
        """Shows new stalls, each in one report, and then stops the job if one is too long."""
        now = time.time()
        for stall in self._waits.stalls(now):
            self.stacks.ask(self._running(stall.missing), partial(self._show_stall, stall))
        if self.stacks.pending:
            return
        too_long = self._waits.too_long(now)
        if too_long and self.job_end.elastic is not None:
            self.stacks.ask(self._running(self.job_end.members), partial(self._end_culprits, too_long))
        else:
            self._check_stuck(too_long)
            self._plan_stalls()

    def _show_stall(self, stall: Stall, stacks: Mapping[int, Stacks]) -> None:
        self.output.show(stall_report(stall, [self._report_on(rank, stacks) for rank in stall.missing]))
        self._show_stalls()

    def _end_culprits(self, too_long: str, stacks: Mapping[int, Stacks]) -> None:
        """Kills the ranks for which others wait too long, so that these go on; stops the job if it finds none."""
        stopped = [rank for rank, answer in stacks.items() if answer.state == STOPPED]
        culprits = set(self._waits.culprits(time.time(), stopped)) - self.killed
        if not culprits:
            self._check_stuck(too_long)
        elif self.job_end.reason is None:
            self.output.show(f"chorosrun: {too_long}: {self.job_end.roles.names(sorted(culprits))} will be killed.")
            self.killed |= culprits
            for rank in culprits:
                self.kill(rank)

            def end_killed() -> None:  # those that have not ended are on hosts that cannot be reached
                self._check_stuck("" if self.killed <= self.job_end.exits.keys() else too_long)

            self.loop.set_deadline("killed", durations.KILLED, end_killed)
        self._plan_stalls()

    def _running(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks whose wrappers can be asked: none before all have started."""
        started = len(self.job_end.started) >= self.job_end.size
        return [rank for rank in ranks if started and rank not in self.job_end.exits]

    def _report_on(self, rank: int, stacks: Mapping[int, Stacks]) -> str:
        start, answer = self.job_end.started.get(rank), stacks.get(rank)
        is_here = start is not None and start.host == os.uname().nodename
        return rank_report(
            self.job_end.roles.name(rank),
            start,
            answer,
            runs=rank in self._running([rank]),
            doing=self._waits.doing(rank),
            progress=self._progress.get(rank),
            blocked=stopped_above(start.pid) if start is not None and is_here and answer is None else 0,
        )

    def send_stacks(self, client: socket.socket) -> None:
        """Sends the stacks of all ranks to the process that has connected."""
        ranks = sorted(self.job_end.members)

        def send(stacks: Mapping[int, Stacks]) -> None:
            send_text(client, "".join(f"{self._report_on(rank, stacks)}\n" for rank in ranks))

        self.stacks.ask(self._running(ranks), send)


def rank_report(
    name: str,
    start: Start | None,
    stacks: Stacks | None,
    *,
    runs: bool = True,
    doing: str = "",
    progress: RankProgress | None = None,
    blocked: int = 0,
) -> str:
    """Returns what is known about a rank; ``None`` and empty arguments: it has not started, answered or reported that.
    ``runs``: its wrapper could be asked. ``blocked``: its wrapper, or mpirun, if a signal has stopped that; else 0.

    >>> print(rank_report("rank 1", Start(1, "a", 7), Stacks(1, "runs", "main thread …")))
    rank 1 on a, PID 7 runs
      main thread …
    """
    if start is None:
        return f"{name} has not started"
    text = f"{name} on {start.host}, PID {start.pid}"
    if stacks is not None and stacks.state:
        text += f" {stacks.state}" + (f": kill -CONT {start.pid} continues it" if stacks.state == STOPPED else "")
    if doing:
        text += f", {doing}"
    if progress is not None and progress.last:
        steps = f", after {progress.steps} training steps" if progress.steps else ""
        text += f"\n  its last collective, {progress.ago:.0f} s ago{steps}: {progress.last}"
    if stacks is not None:
        return f"{text}\n{textwrap.indent(stacks.text, '  ')}"
    if not runs:
        return text
    why = "its wrapper did not answer, or mpirun cannot ask it"
    if blocked:
        why = f"process {blocked} above it, its wrapper or mpirun, {STOPPED}: kill -CONT {blocked} continues it"
    return f"{text}\n  (no stack: {why})"


def stall_report(stall: Stall, missing: Sequence[str]) -> str:
    """Returns the report of a stall, with those of the ranks that are missing.

    >>> stall = Stall("rank 0 has waited 60 s for rank 1 in barrier()", (1,), since=0.0)
    >>> print(stall_report(stall, ["rank 1 on a …"]).partition(", since ")[0])
    chorosrun: rank 0 has waited 60 s for rank 1 in barrier()
    """
    missing = sorted(missing, key=lambda each: "stopped" not in each.partition("\n")[0])
    since = time.strftime("%H:%M:%S", time.localtime(stall.since))
    lines = [f"chorosrun: {stall.text}, since {since}. What {'it does' if len(missing) == 1 else 'they do'}:"]
    lines += [textwrap.indent(each, "  ") for each in missing[:_MOST_STACKS]]
    if len(missing) > _MOST_STACKS:
        lines.append(f"  and {len(missing) - _MOST_STACKS} more: `choros stacks` shows all")
    return "\n".join(lines)
