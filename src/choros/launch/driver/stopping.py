"""The stopping of a job: forwards signals to its ranks, ends them, by one that they can handle, then by SIGKILL.

::

    user ── Ctrl-C, SIGTERM, SIGUSR1 ──►  chorosrun ── signal map, see wrapper.py ─► mpirun ──► wrappers

    a rank fails, hangs SIGTERM ── 2.5 s ──► SIGKILL ── 1.5 s ──► mpirun is ended
    too few are left    SIGTERM ── grace period, to commit ──► SIGKILL ── …
    Ctrl-C              SIGINT ── grace period ──► SIGKILL ── …
    SIGTERM, a timeout  SIGTERM ── grace period ──► SIGKILL ── …
    a second Ctrl-C     SIGKILL ── …

    the chief ends      grace period, in which the others end by themselves; then as if a rank had failed

When every rank has reported its end, the wrappers are released, and mpirun ends; elastic ones do not wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from choros import durations
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.mpirun_process import MpirunProcess
from choros.launch.driver.output import Output
from choros.launch.plan.job import Job
from choros.launch.protocol.frames import Start
from choros.observe import MOVE, events
from choros.observe.events import Detail, Event, Kind
from choros.observe.processes import STOPPED, parent_of, state_of
from choros.transport.loop import Loop

if TYPE_CHECKING:
    from choros.launch.driver.restarts import HostWatch

#: The deadlines of a job that runs.
_DEADLINES = ("progress", "start", "run", "failure", "chief", "lost", "connection", "move", "stall", "killed")


def first_signal(reason: Reason, grace: float) -> tuple[signal.Signals, float] | None:
    """Returns the signal that ranks get before SIGKILL, if any, and the time between both: ``grace`` if they may save.

    >>> first_signal(Reason.INTERRUPT, grace=20)
    (<Signals.SIGINT: 2>, 20)
    """
    if reason is Reason.START_TIMEOUT:
        return None
    if reason in (Reason.FAILURE, Reason.LOST, Reason.STUCK, Reason.OVER, Reason.DONE):
        return signal.SIGTERM, durations.FAILURE_GRACE
    return signal.SIGINT if reason is Reason.INTERRUPT else signal.SIGTERM, grace


@dataclass(eq=False)
class Stopping:
    """Sends the ranks of a job signals; ``waits`` returns lines about who waits for whom, for the job's end.
    ``releasing``: the wrappers are released, and there is nobody left to signal.
    """

    job_end: JobEnd
    output: Output
    loop: Loop
    mpirun: MpirunProcess
    signal_map: Mapping[signal.Signals, signal.Signals]
    grace: float
    waits: Callable[[], Sequence[str]]
    releasing: bool = False
    _has_killed: bool = False
    _held: list[signal.Signals] = field(default_factory=list)

    def on_signal(self, number: signal.Signals) -> None:
        """Does what a signal to chorosrun asks for."""
        were_asked = bool(self.job_end.asked)
        if number != signal.SIGUSR2:
            self.job_end.asked = number
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            if len(self.job_end.started) < self.job_end.size:
                self._held.append(number)  # it would kill a rank that has no handler yet
            elif number == signal.SIGUSR1 and self.job_end.elastic is not None:
                self._preempt()
            else:
                self.send(number)
        elif self.job_end.reason is not None:  # the job is being stopped already
            if were_asked or self.job_end.reason is not Reason.TOO_FEW:  # else those that are left may commit
                self._kill()
        else:
            self.stop(Reason.INTERRUPT if number == signal.SIGINT else Reason.TERMINATE)

    def all_have_started(self) -> None:
        """Does what the signals that had to wait for it ask for."""
        for number in self._held if self.job_end.reason is None else ():
            self.on_signal(number)

    def on_hosts(self, hosts: HostWatch) -> None:
        """Asks the ranks to commit and to end, if the job is to go on on other hosts."""
        self.job_end.move = hosts.wanted()
        if self.job_end.move is None:
            self.loop.cancel("move")
        elif self.job_end.reason is None and not self.job_end.preempted:
            where = ",".join(map(str, self.job_end.move))
            self.output.show(f"chorosrun: the hosts are now {where}. After its next commit the job goes on there.")
            self._move()

    def _move(self) -> None:
        """Asks now and again: ranks that do not commit yet, or not any more, ignore it."""
        if self.job_end.preempted or self.releasing:
            return
        if len(self.job_end.started) >= self.job_end.size:
            self.job_end.moves = True
            self.send(MOVE)
        self.loop.set_deadline("move", durations.MOVE, self._move)

    def _preempt(self) -> None:
        if self.job_end.preempted or self.job_end.reason is not None:
            self.stop(Reason.TERMINATE)
            self._kill()
        else:
            self.job_end.preempted = True
            self.output.show("chorosrun: sent SIGUSR1 to the ranks: they commit and end. A second signal kills them.")
            self.send(signal.SIGUSR1)

    def stop(self, reason: Reason) -> None:
        """Ends the job because of ``reason``, if it is not being ended."""
        if self.job_end.reason is not None or self.releasing:
            return
        self.job_end.reason = reason
        if reason is Reason.TERMINATE and self.job_end.elastic is not None:
            self.job_end.preempted = True
        self.job_end.waits = tuple(self.waits())
        for rank in sorted(self.job_end.missing):
            publish(Kind.RANK_STOPPED, rank, reason=reason.name.lower())
        self.loop.cancel(*_DEADLINES)
        first = first_signal(reason, self.grace)
        if first is None:
            self._kill()
            return
        number, seconds = first
        if reason in (Reason.INTERRUPT, Reason.TERMINATE) and self.job_end.started:
            self.output.show(
                f"chorosrun: sent {number.name} to the {self.job_end.roles.kind(2)}; they have {self.grace:g} s to "
                "end. A second signal kills them."
            )
        self.send(number)
        self.loop.set_deadline("kill", seconds, self._kill)

    def _kill(self) -> None:
        if self.releasing:
            return
        if self._has_killed:
            self.release()
            return
        self._has_killed = True
        self.send(signal.SIGKILL)
        self.loop.set_deadline("kill", durations.KILL_GRACE, self.release)

    def release(self) -> None:
        """Releases the wrappers, and so mpirun: every rank has ended, or had the time for it."""
        self.releasing = True
        self.loop.cancel_all()
        self.output.flush()  # mpirun may need seconds to end
        if signal.SIGKILL in self.signal_map:
            self.send(signal.SIGKILL)
            self.loop.set_deadline("mpirun", durations.RELEASE, self._terminate_mpirun)
        else:
            self._terminate_mpirun()

    def _terminate_mpirun(self) -> None:
        self.mpirun.send(signal.SIGTERM)
        self.loop.set_deadline("mpirun", durations.RELEASE, lambda: self.mpirun.send(signal.SIGKILL))

    def send(self, number: signal.Signals) -> None:
        """Sends the ranks a signal, as the signal that mpirun forwards for it."""
        sent = self.signal_map.get(number)
        if sent is not None:
            self.mpirun.send(sent)
        elif number == signal.SIGKILL:
            self.mpirun.send(signal.SIGTERM)
        else:
            self.output.show(f"chorosrun: this mpirun cannot forward {number.name}; the ranks did not receive it.")


def publish(kind: Kind, rank: int, name: str = "", **details: Detail) -> None:
    """Emits an event about a rank, which is not this process."""
    events.publish(Event(kind, name, rank, time.time(), details))


def kill_rank(rank: Start, job: Job) -> bool:
    """Kills a rank, with the child processes of its group, which no signal through mpirun can.
    It does not wait for its end, which does not come if its host cannot be reached. Returns whether its wrapper reports
    the end: one that is stopped cannot, and is killed.
    """
    with contextlib.suppress(OSError):
        if rank.host == os.uname().nodename:
            wrapper = parent_of(rank.pid)
            is_stopped = state_of(wrapper) == STOPPED
            os.killpg(rank.pid, signal.SIGKILL)
            if is_stopped:
                os.kill(wrapper, signal.SIGKILL)
            return not is_stopped
        # A job may name its hosts in another way than they do themselves: then each one looks whether it is meant.
        command = f"case $(uname -n) in {rank.host}|{rank.host}.*) kill -s KILL -- -{rank.pid};; esac"
        hosts = [host.name for host in job.remote]
        for host in [rank.host] if rank.host in hosts else hosts:
            argv = [*job.ssh.argv(), host, command]
            quiet = subprocess.DEVNULL
            subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    return True
