"""Starts mpirun, listens to the ranks, and ends the job.

::

    user ── Ctrl-C, SIGTERM, SIGUSR1 ──►  chorosrun (this)  ── carriers, see wrapper.py ─► mpirun ──► wrappers
                                             ▲      │
      Start, Text, Result, Exit frames ──────┘      └── stages, see stopping.py: SIGTERM … SIGKILL … let go

mpirun runs in its own session, so a Ctrl-C in the terminal reaches chorosrun alone, which passes it on and
gives the ranks time. The job is over when every rank has reported its end; only then are the wrappers, which
wait, let go, and mpirun with them. With parameter servers the chief's good end is the job's, whatever becomes of the
others, which have the grace period to notice it.
"""

from __future__ import annotations

import os
import signal
import time
from base64 import b64decode
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from choros.launch.driver.mpirun_messages import met_shutdown
from choros.launch.driver.mpirun_process import MpirunProcess
from choros.launch.driver.output import Output
from choros.launch.driver.stopping import Reason, Stage, signal_name, stages
from choros.launch.plan.command import Command
from choros.launch.plan.limits import Limits
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.frames import Events, Exit, Frame, FrameReader, Result, Start, Text
from choros.observe import events
from choros.observe.events import Detail, Event, Kind
from choros.transport.loop import Loop
from choros.transport.signal_pipe import SignalPipe, wake_only

__all__ = ["Outcome", "supervise"]

_MESSAGES = 400
_PIPE_READ = 1 << 16
_PATIENCE = 2.0
#: A rank that has said its farewell may still have a framework to take down.
_TO_END_BY_ITSELF = 1.0
_TO_LET_GO = 3.0
_TO_LISTEN = 1.0
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        size: how many ranks it was to have.
        roles: who was what in it.
        started: the ranks that started.
        exits: how ranks ended, in the order in which we heard of it.
        reason: why it was stopped; ``None`` if it ended by itself.
        results: what the ranks' functions returned, pickled.
        messages: what mpirun itself said.
        mpirun_code: mpirun's exit code.
    """

    size: int
    started: dict[int, Start] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    reason: Reason | None = None
    results: dict[int, bytearray] = field(default_factory=dict)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    mpirun_code: int = 0
    roles: Roles = NO_ROLES

    @property
    def chief_is_done(self) -> bool:
        """Whether there was a chief, it has ended well, and nothing had gone wrong before."""
        chief = self.exits.get(0) if self.roles else None
        return chief is not None and chief.code == 0 and self.reason in (None, Reason.DONE)


def supervise(
    command: Command,
    size: int,
    output: Output,
    *,
    carriers: Mapping[signal.Signals, signal.Signals],
    roles: Roles = NO_ROLES,
    limits: Limits,
    payload: bytes | None = None,
    verbose: bool = False,
) -> Outcome:
    """Runs ``command``, an mpirun, to its end, whatever that is.

    Args:
        command: what to start.
        size: how many ranks it starts.
        output: where the ranks' output goes.
        carriers: which signal to send mpirun for the ranks to get the one on the left.
        roles: who is what.
        limits: how long things may take.
        payload: bytes for rank 0's standard input.
        verbose: show what mpirun says.
    """
    caught = [number for number in _CAUGHT if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    with SignalPipe(dict.fromkeys(caught, wake_only)) as signals:
        return _Supervisor(command, size, output, carriers, roles, limits, payload, verbose, signals).run()


class _Supervisor:
    def __init__(
        self,
        command: Command,
        size: int,
        output: Output,
        carriers: Mapping[signal.Signals, signal.Signals],
        roles: Roles,
        limits: Limits,
        payload: bytes | None,
        verbose: bool,
        signals: SignalPipe,
    ) -> None:
        self._outcome = Outcome(size, roles=roles)
        self._output = output
        self._carriers = carriers
        self._limits = limits
        self._payload = memoryview(payload) if payload is not None else None
        self._verbose = verbose
        self._stages: tuple[Stage, ...] = ()
        self._held_signals: list[signal.Signals] = []
        self._letting_go = False
        self._mpirun = MpirunProcess(command, stdin=payload is not None)
        self._loop = Loop()
        self._pipes = {self._mpirun.stdout, self._mpirun.stderr}
        for pipe in self._pipes:
            self._loop.on_readable(pipe, partial(self._read, pipe, FrameReader()))
        self._loop.on_readable(signals, partial(self._on_signals, signals))

    def run(self) -> Outcome:
        self._loop.set_deadline("progress", _PATIENCE, self._say_starting)
        self._loop.set_deadline("start", self._limits.start, lambda: self._stop(Reason.START_TIMEOUT))
        if self._limits.run is not None:
            self._loop.set_deadline("run", self._limits.run, lambda: self._stop(Reason.TIMEOUT))
        try:
            self._loop.run(until=lambda: self._mpirun.has_ended() or not self._pipes)
            # mpirun is gone; what it wrote last is in its pipes, which an ssh client may hold open for minutes.
            self._loop.cancel_all()
            self._loop.run(until=lambda: not self._pipes, seconds=_TO_LISTEN)
        finally:
            self._loop.close()
            self._outcome.mpirun_code = self._mpirun.finish()
        self._end_lost_ranks()
        for exit_ in self._outcome.exits.values():
            self._output.keep(exit_.rank, exit_.traceback)
        self._output.close()
        return self._outcome

    # what comes from mpirun ---------------------------------------------------------------------

    def _read(self, pipe: int, reader: FrameReader) -> None:
        data = os.read(pipe, _PIPE_READ)
        if not data:
            self._loop.forget(pipe)
            self._pipes.discard(pipe)
        for item in reader.feed(data) if data else reader.end():
            if isinstance(item, str):
                self._on_message(item)
            else:
                self._on_frame(item)

    def _on_message(self, line: str) -> None:
        self._outcome.messages.append(line)
        if self._verbose:
            self._output.screen.say(line)

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Text():
                self._output.write(frame)
            case Result():
                self._outcome.results.setdefault(frame.rank, bytearray()).extend(b64decode(frame.data))
            case Events():
                for line in frame.lines.splitlines():
                    with suppress(ValueError):  # of another version of choros, on another host
                        events.publish(Event.from_json(line))
            case Start():
                self._on_start(frame)
            case Exit():
                self._on_exit(frame)

    def _on_start(self, frame: Start) -> None:
        self._outcome.started[frame.rank] = frame
        _publish(Kind.RANK_STARTED, frame.rank, frame.host, pid=frame.pid, restarts=frame.restarts)
        self._output.open(frame.rank)
        self._loop.cancel("progress")
        if frame.restarts:
            self._output.screen.say(
                f"chorosrun: {self._outcome.roles.name(frame.rank)} on {frame.host} was killed by "
                f"{signal_name(frame.signal)} (signal {frame.signal}) and is started again (restart {frame.restarts})."
            )
            return
        if frame.rank == 0 and self._payload is not None:
            os.set_blocking(self._mpirun.stdin, False)
            self._loop.on_writable(self._mpirun.stdin, self._feed)
        if len(self._outcome.started) == self._outcome.size:
            self._loop.cancel("start")
            for number in self._held_signals:
                self._send(number)

    def _on_exit(self, frame: Exit) -> None:
        if frame.rank in self._outcome.exits:  # it says so again until it is let go
            return
        self._outcome.exits[frame.rank] = frame
        details = {"code": frame.code, "signal": frame.signal, "seconds": frame.seconds}
        _publish(Kind.RANK_ENDED, frame.rank, frame.host, **details)
        if len(self._outcome.exits) == self._outcome.size:
            self._let_go()
        elif self._outcome.chief_is_done:  # the others see that it has gone, and end
            if frame.rank == 0:
                self._loop.cancel("run")
                self._loop.set_deadline("chief", self._limits.grace, lambda: self._stop(Reason.DONE))
        elif frame.code != 0 and met_shutdown(frame.traceback):
            # Whom it met is ending by itself, and its exit code tells why: let it.
            self._loop.set_deadline("failure", _TO_END_BY_ITSELF, lambda: self._stop(Reason.FAILURE))
        elif frame.code != 0:
            self._stop(Reason.FAILURE)

    def _feed(self) -> None:
        """Writes rank 0's standard input. It stays open: mpirun may drop what it holds when it sees the end."""
        assert self._payload is not None  # noqa: S101  (registered only then)
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
            if len(self._outcome.started) < self._outcome.size:
                self._held_signals.append(number)  # a rank that has no handler yet would die of it
            else:
                self._send(number)
            return
        reason = Reason.INTERRUPT if number == signal.SIGINT else Reason.TERMINATE
        if self._outcome.reason is not None:  # we are at it already: by force, then
            self._stages = self._stages[-1:]
            self._next_stage()
        else:
            self._stop(reason)

    def _stop(self, reason: Reason) -> None:
        if self._outcome.reason is not None or self._letting_go:
            return
        self._outcome.reason = reason
        for rank in sorted(set(range(self._outcome.size)) - self._outcome.exits.keys()):
            _publish(Kind.RANK_STOPPED, rank, reason=reason.name.lower())
        self._loop.cancel("progress", "start", "run", "failure", "chief")
        self._stages = stages(reason, self._limits.grace)
        if reason in (Reason.INTERRUPT, Reason.TERMINATE) and self._outcome.started:
            self._output.screen.say(
                f"chorosrun: the {self._outcome.roles.kind(2)} got {self._stages[0].signal.name} and "
                f"have {self._limits.grace:g} s to end; once more ends them at once."
            )
        self._next_stage()

    def _next_stage(self) -> None:
        if self._letting_go:
            return
        if not self._stages:
            self._let_go()
            return
        stage, self._stages = self._stages[0], self._stages[1:]
        self._send(stage.signal)
        self._loop.set_deadline("stage", stage.seconds, self._next_stage)

    def _let_go(self) -> None:
        """Every rank has ended, or cannot be made to: the wrappers and mpirun may go."""
        self._letting_go = True
        self._loop.cancel_all()
        if signal.SIGKILL in self._carriers:
            self._send(signal.SIGKILL)
            self._loop.set_deadline("mpirun", _TO_LET_GO, self._terminate_mpirun)
        else:
            self._terminate_mpirun()

    def _terminate_mpirun(self) -> None:
        self._mpirun.send(signal.SIGTERM)
        self._loop.set_deadline("mpirun", _TO_LET_GO, lambda: self._mpirun.send(signal.SIGKILL))

    def _send(self, number: signal.Signals) -> None:
        """Sends the ranks a signal, in the guise that mpirun passes on."""
        carrier = self._carriers.get(number)
        if carrier is not None:
            self._mpirun.send(carrier)
        elif number == signal.SIGKILL:
            self._mpirun.send(signal.SIGTERM)
        else:
            self._output.screen.say(f"chorosrun: this mpirun cannot pass {number.name} on; the ranks did not get it.")

    def _end_lost_ranks(self) -> None:
        """A rank whose wrapper could not report its end, because it was killed, may have left processes here."""
        for start in self._outcome.started.values():
            if start.rank not in self._outcome.exits and start.host == os.uname().nodename:
                try:
                    os.killpg(start.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    def _say_starting(self) -> None:
        size, roles = self._outcome.size, self._outcome.roles
        self._output.screen.say(f"chorosrun: starting {size} {roles.kind(size)} …")


def _publish(kind: Kind, rank: int, name: str = "", **details: Detail) -> None:
    """Emits an event about a rank, which is another process than this one."""
    events.publish(Event(kind, name, rank, time.time(), details))
