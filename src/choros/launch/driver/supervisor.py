"""The supervisor: starts mpirun, receives the ranks' frames, and ends the job.

::

    user ── Ctrl-C, SIGTERM, SIGUSR1 ──►  chorosrun (this)  ── signal map, see wrapper.py ─► mpirun ──► wrappers
                                             ▲      │
      Start, Text, Result, Exit frames ──────┘      └── stages, see stopping.py: SIGTERM … SIGKILL … release

mpirun runs in its own session, so a Ctrl-C in the terminal reaches only chorosrun, which forwards it and gives the
ranks time to save. The job is over when every rank has reported its end; only then are the waiting wrappers
released, and mpirun ends with them. In an elastic job, the others go on without a rank that fails, while enough are
left; wrappers do not wait. With parameter servers, the job has succeeded when the chief ends with 0; the
other processes have the grace period to end, and their exit codes do not count.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from choros.errors import PREEMPTED, PeerLostError
from choros.launch.driver.failures import headline
from choros.launch.driver.host_watch import HostWatch
from choros.launch.driver.mpirun_messages import met_shutdown
from choros.launch.driver.mpirun_process import MpirunProcess
from choros.launch.driver.output import Output
from choros.launch.driver.rank_killer import RankKiller
from choros.launch.driver.stack_requests import StackRequests
from choros.launch.driver.stall_report import RankReport, job_report, stall_report
from choros.launch.driver.stopping import Reason, Stage, signal_name, stages
from choros.launch.driver.waits import Stall, Waits
from choros.launch.plan.command import Command
from choros.launch.plan.elastic import Elastic
from choros.launch.plan.limits import Limits
from choros.launch.plan.restart import Restart
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.processes.control import send_text
from choros.launch.protocol.frames import Events, Exit, Frame, FrameReader, RankProgress, Result, Stacks, Start, Text
from choros.launch.protocol.wrapper_options import STACKS
from choros.observe import MOVE, events
from choros.observe.events import INIT, Detail, Event, Kind
from choros.observe.stacks import STOPPED, stopped_above
from choros.observe.stragglers import Stragglers
from choros.transport.loop import Loop
from choros.transport.signal_pipe import SignalPipe, wake_only

if TYPE_CHECKING:
    import socket

__all__ = ["JobEnd", "supervise"]

_MESSAGES = 400
_PIPE_READ = 1 << 18
_SILENT_SECONDS = 2.0
_GATE_SECONDS = 0.001
#: A rank that has called ``shutdown`` may still need time to tear down its framework.
_SHUTDOWN_SECONDS = 1.0
#: From the first rank that has lost others to the last one; they do not notice it at the same moment.
_LOST_SECONDS = 2.0
#: How long MPI may take to connect ranks that have all come.
_CONNECT_SECONDS = 10.0
_MOVE_SECONDS = 2.0
_RELEASE_SECONDS = 3.0
_DRAIN_SECONDS = 1.0
#: A rank that was killed has ended by then, also on another host.
_KILLED_SECONDS = 10.0
#: Ranks may save before they end.
_SAVING = (Reason.INTERRUPT, Reason.TERMINATE, Reason.TIMEOUT)
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class JobEnd:
    """How a job and its ranks ended.

    Attributes:
        size: the job's number of ranks.
        roles: the roles of its processes.
        started: the ranks that started.
        exits: the ranks' exits, in the order of their reports.
        reason: why the job was stopped; ``None`` if it ended by itself.
        results: the return values of the ranks' functions, pickled.
        messages: mpirun's own messages.
        mpirun_code: mpirun's exit code.
        waits: who waited for whom when the job was stopped.
        stuck: why a rank could not continue, if the job was stopped for that.
        elastic: the bounds of an elastic job.
        preempted: the ranks of an elastic job were asked to commit and to end.
        unconnected: the hosts of an elastic job could not reach each other when it started.
        move: how the job is to be started on the hosts of now, if they have changed.
        done: the ranks whose scripts have ended, or were not needed any more.
        initialized: the ranks that have called ``init()``.
        together: the ranks that have left the job together with all others that were left.
        given_up: what an elastic job has lost, and why it was not started again.
    """

    size: int
    started: dict[int, Start] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    reason: Reason | None = None
    results: dict[int, bytearray] = field(default_factory=dict)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    mpirun_code: int = 0
    roles: Roles = NO_ROLES
    waits: tuple[str, ...] = ()
    stuck: str = ""
    elastic: Elastic | None = None
    preempted: bool = False
    unconnected: bool = False
    move: Restart | None = None
    done: set[int] = field(default_factory=set)
    initialized: set[int] = field(default_factory=set)
    together: set[int] = field(default_factory=set)
    given_up: str = ""

    @property
    def members(self) -> set[int]:
        """The ranks of the job, those that were added to it among them."""
        return {*range(self.size), *self.started}

    @property
    def missing(self) -> set[int]:
        """The ranks that have not reported their end."""
        return self.members - self.exits.keys()

    @property
    def left(self) -> int:
        """The number of ranks that have not failed."""
        failed = {rank for rank, end in self.exits.items() if end.code not in (0, PREEMPTED) and not end.stopped}
        return len(self.members - failed)

    def has_finished(self, rank: int) -> bool:
        """Whether a rank has made the job's last step: it ended with 0, and did not leave while others went on."""
        end = self.exits.get(rank)
        if end is None or end.code != 0 or end.stopped:
            return False
        is_new = rank in self.started and self.started[rank].added
        return rank in self.together or (rank not in self.initialized and not is_new)

    @property
    def lost_mpirun(self) -> str:
        """How a signal of somebody else has ended mpirun, as a sentence; empty if none has.

        It handles all but SIGKILL by ending the ranks, without a word; other ends it explains, or a rank's end does.
        """
        if self.mpirun_code < 0:
            return f"mpirun was killed by {signal_name(-self.mpirun_code)} (signal {-self.mpirun_code})"
        ends = self.exits.values()
        failed = self.elastic is None and any(end.code and not end.stopped for end in ends)
        ended_early = bool(self.missing) or any(end.stopped for end in ends)
        finished = any(map(self.has_finished, self.exits))
        is_cause = self.reason in (None, Reason.FAILURE) and not (failed or finished or self.messages)
        whole = len(self.started) >= self.size
        return "mpirun was ended by a signal" if self.mpirun_code and whole and ended_early and is_cause else ""

    @property
    def chief_is_done(self) -> bool:
        """Whether the job has a chief that ended with 0 before any other process failed."""
        chief = self.exits.get(0) if self.roles else None
        return chief is not None and chief.code == 0 and self.reason in (None, Reason.DONE)


def supervise(
    command: Command,
    size: int,
    output: Output,
    *,
    signal_map: Mapping[signal.Signals, signal.Signals],
    roles: Roles = NO_ROLES,
    elastic: Elastic | None = None,
    killer: RankKiller | None = None,
    limits: Limits,
    frame_pipes: Sequence[int] = (),
    control: socket.socket | None = None,
    hosts: HostWatch | None = None,
    payload: bytes | None = None,
    verbose: bool = False,
) -> JobEnd:
    """Runs ``command``, an mpirun, until the job has ended.

    Args:
        command: the mpirun command.
        size: the number of ranks it starts.
        output: receives the ranks' output.
        signal_map: signal for the ranks → signal to send to mpirun.
        roles: the roles of the processes.
        elastic: the bounds of an elastic job.
        killer: kills single ranks; ``None``: the job has no other hosts.
        limits: the time limits.
        frame_pipes: the pipes through which wrappers on this host send frames.
        control: the socket at which ``choros stacks`` asks for the stacks of all ranks.
        hosts: the hosts as they come and go.
        payload: bytes for rank 0's standard input.
        verbose: show mpirun's messages.
    """
    caught = [number for number in _CAUGHT if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    with SignalPipe(dict.fromkeys(caught, wake_only)) as signals:
        job_end = JobEnd(size, roles=roles, elastic=elastic)
        job = _Supervisor(
            command,
            job_end,
            output,
            signal_map,
            killer or RankKiller(),
            limits,
            frame_pipes,
            control,
            hosts,
            payload,
            verbose,
            signals,
        )
        return job.run()


class _Supervisor:
    def __init__(
        self,
        command: Command,
        job_end: JobEnd,
        output: Output,
        signal_map: Mapping[signal.Signals, signal.Signals],
        killer: RankKiller,
        limits: Limits,
        frame_pipes: Sequence[int],
        control: socket.socket | None,
        hosts: HostWatch | None,
        payload: bytes | None,
        verbose: bool,
        signals: SignalPipe,
    ) -> None:
        self._job_end = job_end
        self._output = output
        self._signal_map = signal_map
        self._killer = killer
        self._limits = limits
        self._payload = memoryview(payload) if payload is not None else None
        self._verbose = verbose
        self._stages: tuple[Stage, ...] = ()
        self._held_signals: list[signal.Signals] = []
        self._releasing = False
        self._connects = False
        self._waits = Waits(
            job_end.size,
            limits.exit,
            limits.exit_of_all,
            limits.stall,
            limits.stall_shutdown,
            elastic=job_end.elastic is not None,
            roles=job_end.roles,
        )
        self._stragglers = Stragglers(job_end.size, job_end.roles.names)
        self._progress: dict[int, RankProgress] = {}
        #: The ranks that were killed because others waited for them too long.
        self._killed: set[int] = set()
        #: The ranks that were added, and that the others have not taken in yet; and those of them that nobody needs.
        self._newcomers: set[int] = set()
        self._unneeded: set[int] = set()
        self._gate_is_open = bool(command.gate)
        self._mpirun = MpirunProcess(command, stdin=payload is not None)
        self._loop = Loop()
        self._pipes = {self._mpirun.stdout, self._mpirun.stderr}
        self._frame_pipes = frame_pipes
        self._readers = {pipe: FrameReader() for pipe in (*self._pipes, *frame_pipes)}
        for pipe in self._readers:
            self._loop.on_readable(pipe, partial(self._read, pipe))
        self._loop.on_readable(signals, partial(self._on_signals, signals))
        self._stacks = StackRequests(self._loop, partial(self._send, STACKS) if STACKS in signal_map else None)
        if control is not None:
            self._loop.on_readable(control, partial(self._on_control, control))
        if hosts is not None:
            self._loop.on_readable(hosts, partial(self._on_hosts, hosts))

    def run(self) -> JobEnd:
        if self._gate_is_open:
            self._loop.repeat("gate", _GATE_SECONDS, self._mpirun.look_at_gate)
        self._loop.set_deadline("progress", _SILENT_SECONDS, self._show_starting)
        self._loop.set_deadline("start", self._limits.start, lambda: self._stop(Reason.START_TIMEOUT))
        if self._limits.run is not None:
            self._loop.set_deadline("run", self._limits.run, lambda: self._stop(Reason.TIMEOUT))
        try:
            self._loop.run(until=lambda: self._mpirun.has_ended() or not self._pipes)
            # mpirun has ended; its last output is in its pipes, which an ssh client may hold open for minutes.
            self._loop.cancel_all()
            self._loop.run(until=lambda: not self._pipes, seconds=_DRAIN_SECONDS)
            self._drain()
        finally:
            self._loop.close()
            self._job_end.mpirun_code = self._mpirun.finish()
        self._end_lost_ranks()
        self._show_sentence(self._stragglers.of_job() if self._job_end.reason is None else "")
        for exit_ in self._job_end.exits.values():
            self._output.write_to_file(exit_.rank, exit_.traceback)
        self._output.finish()
        return self._job_end

    # mpirun's output ------------------------------------------------------------------------------

    def _read(self, pipe: int) -> None:
        reader, data = self._readers[pipe], os.read(pipe, _PIPE_READ)
        if not data:
            self._loop.forget(pipe)
            self._pipes.discard(pipe)
        for item in reader.feed(data) if data else reader.end():
            if isinstance(item, str):
                self._on_message(item)
            else:
                self._on_frame(item)

    def _drain(self) -> None:
        """Reads what is left in the frame pipes, which do not end."""
        for pipe in self._frame_pipes:
            with suppress(BlockingIOError):
                while True:
                    self._read(pipe)

    def _on_message(self, line: str) -> None:
        self._job_end.messages.append(line)
        if self._verbose:
            self._output.show(line)

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Text():
                self._output.write(frame)
                self._plan_lines()
            case Result():
                self._job_end.results.setdefault(frame.rank, bytearray()).extend(frame.data)
            case Events():
                for line in frame.lines.splitlines():
                    with suppress(ValueError):  # from another version of choros on another host
                        self._on_event(frame.rank, Event.from_json(line))
            case Start():
                self._on_start(frame)
            case RankProgress():
                self._on_progress(frame)
            case Stacks():
                self._stacks.note(frame)
            case Exit():
                self._on_exit(frame)

    def _on_progress(self, frame: RankProgress) -> None:
        self._progress[frame.rank] = frame
        self._show_sentence(self._stragglers.note(frame.rank_steps) if frame.rank not in self._job_end.exits else "")

    def _show_sentence(self, sentence: str) -> None:
        if sentence:
            self._output.show(f"chorosrun: {sentence}.")

    def _plan_lines(self) -> None:
        """Schedules the writing of the lines that the output holds."""
        seconds = self._output.due_after()
        if seconds is None:
            self._loop.cancel("lines")
        else:
            self._loop.set_deadline("lines", seconds, self._write_lines)

    def _write_lines(self) -> None:
        self._output.write_due()
        self._plan_lines()

    def _on_event(self, rank: int, event: Event) -> None:
        events.publish(event)
        if event.kind is Kind.SCRIPT_ENDED:
            self._job_end.done.add(rank)
        if event.kind is Kind.FINISHED:
            self._job_end.together.add(rank)
        if event.kind is Kind.WAITING and event.name == INIT:
            self._job_end.initialized.add(rank)
            self._job_end.together.discard(rank)
        if event.kind is Kind.RANK_JOINED:
            self._newcomers.discard(rank)
        stuck = self._waits.note(rank, event, time.time())
        if stuck and self._job_end.reason in _SAVING:
            self._kill(rank)  # it waits for one that has ended: it saves nothing
        self._check_stuck(stuck)
        self._plan_stalls()
        self._plan_connection()

    def _check_stuck(self, stuck: str) -> None:
        """Stops the job if a rank is stuck."""
        if stuck and self._job_end.reason is None:
            self._job_end.stuck = stuck
            self._stop(Reason.OVER if self._waits.only_leave else Reason.STUCK)

    def _plan_connection(self) -> None:
        """Schedules the end of a job that MPI does not start although all ranks have come: it would wait for ever.

        An elastic job whose hosts do not reach each other soon goes on on one of them.
        """
        if not self._waits.connecting() or self._job_end.reason is not None:
            self._loop.cancel("connection")
            self._connects = False
        elif not self._connects:
            self._connects = True
            several = self._job_end.elastic is not None and len(self._hosts()) > 1
            seconds = _CONNECT_SECONDS if several else self._limits.start
            self._loop.set_deadline("connection", seconds, partial(self._on_unconnected, seconds, several))

    def _on_unconnected(self, seconds: float, several: bool) -> None:
        self._job_end.unconnected = several
        hosts = ", ".join(sorted(self._hosts()))
        cause = (
            f"the hosts {hosts} must reach each other's TCP ports. --network-interfaces selects a network"
            if len(self._hosts()) > 1
            else "MPI_Init does not return"
        )
        for user in self._mpirun.strangers():
            cause += f"; a process of another user (uid {user}) is connected to mpirun, which may wait for it"
        self._check_stuck(f"all ranks have called init(), and are not connected after {seconds:g} s: {cause}")

    def _hosts(self) -> set[str]:
        return {start.host for start in self._job_end.started.values()}

    def _plan_stalls(self) -> None:
        seconds = self._waits.next_stall(time.time())
        ending = not self._killed <= self._job_end.exits.keys()
        if seconds is None or ending or self._job_end.reason is not None or self._releasing:
            self._loop.cancel("stall")
        else:
            self._loop.set_deadline("stall", seconds, self._show_stalls)

    def _show_stalls(self) -> None:
        """Shows new stalls, each in one report, and then stops the job if one is too long."""
        now = time.time()
        for stall in self._waits.stalls(now):
            self._stacks.ask(self._running(stall.missing), partial(self._show_stall, stall))
        if self._stacks.pending:
            return
        too_long = self._waits.too_long(now)
        if too_long and self._job_end.elastic is not None:
            self._stacks.ask(self._running(self._job_end.members), partial(self._end_culprits, too_long))
        else:
            self._check_stuck(too_long)
            self._plan_stalls()

    def _end_culprits(self, too_long: str, stacks: Mapping[int, Stacks]) -> None:
        """Kills the ranks for which others wait too long, so that these go on; stops the job if it finds none."""
        stopped = [rank for rank, answer in stacks.items() if answer.state == STOPPED]
        culprits = set(self._waits.culprits(time.time(), stopped)) - self._killed
        if not culprits:
            self._check_stuck(too_long)
        elif self._job_end.reason is None:
            self._output.show(f"chorosrun: {too_long}: {self._job_end.roles.names(sorted(culprits))} will be killed.")
            self._killed |= culprits
            for rank in culprits:
                self._kill(rank)
            self._loop.set_deadline("killed", _KILLED_SECONDS, lambda: self._end_killed(too_long))
        self._plan_stalls()

    def _end_killed(self, too_long: str) -> None:
        """Stops the job if ranks that were killed have not ended: their hosts cannot be reached."""
        if not self._killed <= self._job_end.exits.keys():
            self._check_stuck(too_long)

    def _show_stall(self, stall: Stall, stacks: Mapping[int, Stacks]) -> None:
        self._output.show(stall_report(stall, [self._report_on(rank, stacks) for rank in stall.missing]))
        self._show_stalls()

    def _running(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks whose wrappers can be asked: none before all have started."""
        started = len(self._job_end.started) >= self._job_end.size
        return [rank for rank in ranks if started and rank not in self._job_end.exits]

    def _report_on(self, rank: int, stacks: Mapping[int, Stacks]) -> RankReport:
        start, answer, roles = self._job_end.started.get(rank), stacks.get(rank), self._job_end.roles
        doing = self._waits.doing(rank)
        is_running = rank in self._running([rank])
        blocked = 0
        if start is not None and answer is None and start.host == os.uname().nodename:
            blocked = stopped_above(start.pid)
        return RankReport(roles.name(rank), start, answer, is_running, doing, self._progress.get(rank), blocked)

    def _on_control(self, control: socket.socket) -> None:
        """Sends the stacks of all ranks to the process that has connected."""
        try:
            client, _ = control.accept()
        except OSError:  # it has gone
            return
        ranks = sorted(self._job_end.members)

        def send(stacks: Mapping[int, Stacks]) -> None:
            send_text(client, job_report([self._report_on(rank, stacks) for rank in ranks]))

        self._stacks.ask(self._running(ranks), send)

    def _on_start(self, frame: Start) -> None:
        if self._gate_is_open:
            self._close_gate()
        self._job_end.started[frame.rank] = frame
        if frame.added:
            self._job_end.exits.pop(frame.rank, None)
            self._killed.discard(frame.rank)
            self._newcomers.add(frame.rank)
            self._waits.forget(frame.rank)
            self._output.show(
                f"chorosrun: a new rank {frame.rank} was started on {frame.host}; it joins when it is ready."
            )
        _publish(Kind.RANK_STARTED, frame.rank, frame.host, pid=frame.pid, restarts=frame.restarts)
        self._loop.cancel("progress")
        if frame.restarts:
            self._output.show(
                f"chorosrun: {self._job_end.roles.name(frame.rank)} on {frame.host} was killed by "
                f"{signal_name(frame.signal)} (signal {frame.signal}) and was restarted (restart {frame.restarts})."
            )
            return
        if frame.rank == 0 and self._payload is not None:
            os.set_blocking(self._mpirun.stdin, False)
            self._loop.on_writable(self._mpirun.stdin, self._feed)
        if len(self._job_end.started) == self._job_end.size and not frame.added:
            self._loop.cancel("start")
            for number in self._held_signals:
                self._send(number)

    def _close_gate(self) -> None:
        """mpirun has opened all of its sockets, and wrappers wait for the key."""
        self._gate_is_open = False
        self._loop.cancel("gate")
        if not self._mpirun.close_gate():
            self._output.show(
                "chorosrun: the kernel, or this container, does not let this job close mpirun's sockets: another user "
                "of this machine could run commands as you through them. See docs/security.md."
            )

    def _on_exit(self, frame: Exit) -> None:
        if frame.rank in self._job_end.exits:  # a wrapper repeats its report until it is released
            return
        if frame.rank in self._unneeded:
            frame = replace(frame, code=0, signal=0, traceback="")
        self._newcomers.discard(frame.rank)
        self._job_end.exits[frame.rank] = frame
        details = {"code": frame.code, "signal": frame.signal, "seconds": frame.seconds}
        _publish(Kind.RANK_ENDED, frame.rank, frame.host, **details)
        if self._job_end.reason in _SAVING:
            self._waits.ended(frame.rank, time.time())
        if frame.code not in (0, PREEMPTED) and self._job_end.elastic is not None:
            self._on_loss(frame, self._job_end.elastic)
        if self._job_end.exits.keys() >= self._job_end.members:
            self._release_wrappers()
        elif self._job_end.chief_is_done:  # the others detect the end of the chief and end, too
            if frame.rank == 0:
                self._loop.cancel("run")
                self._loop.set_deadline("chief", self._limits.grace, lambda: self._stop(Reason.DONE))
        elif frame.code != 0 and self._job_end.elastic is None and met_shutdown(frame.traceback):
            # The rank that shut down ends by itself, and its exit code is the cause: wait for it.
            self._loop.set_deadline("failure", _SHUTDOWN_SECONDS, lambda: self._stop(Reason.FAILURE))
        elif frame.code != 0 and self._job_end.elastic is None:
            self._stop(Reason.FAILURE)
        elif self._job_end.members - self._job_end.exits.keys() <= self._newcomers:
            self._end_newcomers()
        elif frame.code == 0:
            self._check_stuck(self._waits.ended(frame.rank, time.time()))
            self._plan_stalls()

    def _end_newcomers(self) -> None:
        """Ends the processes that were to become ranks, when all ranks have ended."""
        for rank in self._newcomers - self._unneeded:
            self._unneeded.add(rank)
            self._job_end.done.add(rank)  # so that it is no loss if mpirun fails now
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        start = self._job_end.started[rank]
        if not self._killer.kill(start):
            self._on_exit(Exit(rank, start.host, 128 + signal.SIGKILL, signal=signal.SIGKILL))

    def _on_loss(self, end: Exit, elastic: Elastic) -> None:
        """Continues an elastic job without a rank that has failed, if enough are left."""
        left = self._job_end.left
        if self._job_end.reason is not None or end.stopped:  # stopped by its wrapper, which has lost mpirun
            return
        if end.code == PeerLostError.exit_code and len(self._hosts()) > 1:
            # Those that have lost others, too, say so first: what they cannot reach decides where the job goes on.
            self._loop.set_deadline("lost", _LOST_SECONDS, lambda: self._stop(Reason.LOST))
            return
        if left < elastic.least:
            self._stop(Reason.TOO_FEW)
            return
        running = len(self._job_end.members - self._job_end.exits.keys())
        go_on = f"{running} {self._job_end.roles.kind(running)} go{'es' * (running == 1)} on"
        how = f"rank {end.rank} was killed" if end.rank in self._killed else headline(end, self._job_end.roles)
        self._output.show(f"chorosrun: {how}; {go_on if running else 'the others have ended'}.")
        if end.traceback:
            self._output.show(end.traceback)
        self._check_stuck(self._waits.ended(end.rank, time.time(), f"failed with exit code {end.code}"))
        self._plan_stalls()

    def _feed(self) -> None:
        """Writes rank 0's standard input. It stays open: at end of file, mpirun may drop buffered bytes."""
        assert self._payload is not None  # noqa: S101  (registered only with a payload)
        try:
            self._payload = self._payload[os.write(self._mpirun.stdin, self._payload[:_PIPE_READ]) :]
        except BrokenPipeError:
            self._payload = self._payload[:0]
        if not self._payload:
            self._loop.forget(self._mpirun.stdin)

    # stopping -----------------------------------------------------------------------------------

    def _on_signals(self, signals: SignalPipe) -> None:
        for number in signals.read():
            self._on_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            if len(self._job_end.started) < self._job_end.size:
                self._held_signals.append(number)  # it would kill a rank that has no handler yet
            elif number == signal.SIGUSR1 and self._job_end.elastic is not None:
                self._preempt()
            else:
                self._send(number)
            return
        reason = Reason.INTERRUPT if number == signal.SIGINT else Reason.TERMINATE
        if self._job_end.reason is not None:  # the job is being stopped already: kill the ranks now
            self._stages = self._stages[-1:]
            self._next_stage()
        else:
            self._stop(reason)

    def _on_hosts(self, hosts: HostWatch) -> None:
        """Asks the ranks to commit and to end, if the job is to go on on other hosts."""
        self._job_end.move = hosts.wanted()
        if self._job_end.move is None:
            self._loop.cancel("move")
        elif self._job_end.reason is None and not self._job_end.preempted:
            where = ",".join(map(str, self._job_end.move.hosts))
            self._output.show(f"chorosrun: the hosts are now {where}. After its next commit the job goes on there.")
            self._move()

    def _move(self) -> None:
        """Asks now and again: ranks that do not commit yet, or not any more, ignore it."""
        if self._job_end.preempted or self._releasing:
            return
        if len(self._job_end.started) >= self._job_end.size:
            self._send(MOVE)
        self._loop.set_deadline("move", _MOVE_SECONDS, self._move)

    def _preempt(self) -> None:
        """Asks the ranks of an elastic job to commit and to end; without a limit at first, at once the second time."""
        if self._job_end.preempted:
            self._stop(Reason.TERMINATE)
            self._stages = self._stages[-1:]
            self._next_stage()
        else:
            self._job_end.preempted = True
            self._output.show("chorosrun: sent SIGUSR1 to the ranks: they commit and end. A second signal kills them.")
            self._send(signal.SIGUSR1)

    def _stop(self, reason: Reason) -> None:
        if self._job_end.reason is not None or self._releasing:
            return
        self._job_end.reason = reason
        if reason is Reason.TERMINATE and self._job_end.elastic is not None:
            self._job_end.preempted = True
        self._job_end.waits = tuple(self._waits.lines(time.time()))
        for rank in sorted(self._job_end.members - self._job_end.exits.keys()):
            _publish(Kind.RANK_STOPPED, rank, reason=reason.name.lower())
        self._loop.cancel(
            "progress", "start", "run", "failure", "chief", "lost", "connection", "move", "stall", "killed"
        )
        self._stages = stages(reason, self._limits.grace)
        if reason in (Reason.INTERRUPT, Reason.TERMINATE) and self._job_end.started:
            self._output.show(
                f"chorosrun: sent {self._stages[0].signal.name} to the {self._job_end.roles.kind(2)}; they have "
                f"{self._limits.grace:g} s to end. A second signal kills them."
            )
        self._next_stage()

    def _next_stage(self) -> None:
        if self._releasing:
            return
        if not self._stages:
            self._release_wrappers()
            return
        stage, self._stages = self._stages[0], self._stages[1:]
        self._send(stage.signal)
        self._loop.set_deadline("stage", stage.seconds, self._next_stage)

    def _release_wrappers(self) -> None:
        """Releases the wrappers, and so mpirun: every rank has ended, or the last stage is over."""
        self._releasing = True
        self._loop.cancel_all()
        self._output.flush()  # mpirun may need seconds to end
        if signal.SIGKILL in self._signal_map:
            self._send(signal.SIGKILL)
            self._loop.set_deadline("mpirun", _RELEASE_SECONDS, self._terminate_mpirun)
        else:
            self._terminate_mpirun()

    def _terminate_mpirun(self) -> None:
        self._mpirun.send(signal.SIGTERM)
        self._loop.set_deadline("mpirun", _RELEASE_SECONDS, lambda: self._mpirun.send(signal.SIGKILL))

    def _send(self, number: signal.Signals) -> None:
        """Sends the ranks a signal, as the signal that mpirun forwards for it."""
        sent = self._signal_map.get(number)
        if sent is not None:
            self._mpirun.send(sent)
        elif number == signal.SIGKILL:
            self._mpirun.send(signal.SIGTERM)
        else:
            self._output.show(f"chorosrun: this mpirun cannot forward {number.name}; the ranks did not receive it.")

    def _end_lost_ranks(self) -> None:
        """Kills the processes on this host of ranks whose wrapper was killed before it could report their end."""
        for start in self._job_end.started.values():
            if start.rank not in self._job_end.exits and start.host == os.uname().nodename:
                try:
                    os.killpg(start.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    def _show_starting(self) -> None:
        size, roles = self._job_end.size, self._job_end.roles
        self._output.show(f"chorosrun: starting {size} {roles.kind(size)} …")


def _publish(kind: Kind, rank: int, name: str = "", **details: Detail) -> None:
    """Emits an event about a rank, which is not this process."""
    events.publish(Event(kind, name, rank, time.time(), details))
