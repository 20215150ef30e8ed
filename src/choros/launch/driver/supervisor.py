"""The supervisor: starts mpirun, receives the ranks' frames, and knows when the job has ended.

::

    chorosrun (this) ── signals (``stopping.py``) ──► mpirun ──► wrappers
         ▲                                                          │
         └──────── Start, Written, Exit, … frames ◄─────────────────┘
         events and progress of the ranks ──► ``wait_watch.py``: who waits for whom, and for how long

mpirun has its own session: a Ctrl-C reaches only chorosrun, which forwards it and gives ranks time to save. With
parameter servers, the job succeeds when the chief ends with 0: others have the grace period, and their exit codes do
not count.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, final

from choros import durations
from choros.errors import PREEMPTED, PeerLostError
from choros.launch.driver.job_end import JobEnd, Reason, signal_name
from choros.launch.driver.job_record import JobRecord
from choros.launch.driver.mpirun_process import MpirunProcess
from choros.launch.driver.outcome import headline, met_shutdown
from choros.launch.driver.output import Output, not_waiting
from choros.launch.driver.stopping import Stopping, kill_rank, publish
from choros.launch.driver.wait_watch import StackRequests, WaitWatch
from choros.launch.plan.command import Command
from choros.launch.plan.job import Elastic, Job, Limits
from choros.launch.processes.control import RECORD_OF, STACKS_OF, VIEW_OF, answer, send_text
from choros.launch.protocol.frames import Exit, Frame, FrameReader, Received, Stacks, Start, Written
from choros.launch.protocol.payload import PayloadSender
from choros.launch.protocol.wrapper_options import STACKS
from choros.observe import events
from choros.observe.events import Event, Kind
from choros.observe.progress import RankProgress
from choros.transport.loop import Loop, SignalPipe

if TYPE_CHECKING:
    import socket

    from choros.launch.driver.restarts import HostWatch

_PIPE_READ = 1 << 18
#: The last moments of each rank that a view gets, once a second: the whole record of many ranks takes a second.
_VIEWED = 16


@final
class Supervisor:
    """Runs ``job`` by ``command``, an mpirun; ``signal_map``: signal for the ranks → signal to mpirun.
    ``signals`` are ``caught_signals()``.
    """

    def __init__(
        self,
        job: Job,
        command: Command,
        output: Output,
        record: JobRecord,
        limits: Limits,
        signals: SignalPipe,
        signal_map: Mapping[signal.Signals, signal.Signals],
        *,
        frame_pipes: Sequence[int] = (),
        clients: Mapping[str, socket.socket | None] | None = None,
        hosts: HostWatch | None = None,
        payload: bytes | None = None,
        verbose: bool = False,
    ) -> None:
        self._job = job
        self._job_end = job_end = JobEnd(job.size, roles=job.roles, elastic=job.elastic)
        self._output = output
        self._record = record
        self._limits = limits
        self._verbose = verbose
        #: The ranks that were added, and that nobody needs any more.
        self._unneeded: set[int] = set()
        self._gate_is_open = bool(command.gate)
        self._mpirun = mpirun = MpirunProcess(command, stdin=payload is not None)
        self._loop = loop = Loop()
        self._payload = PayloadSender(loop, mpirun.stdin, payload) if payload is not None else None
        self._pipes = {mpirun.stdout, mpirun.stderr}
        self._frame_pipes = frame_pipes
        self._readers = {pipe: FrameReader() for pipe in (*self._pipes, *frame_pipes)}
        for pipe in self._readers:
            loop.on_readable(pipe, partial(self._read, pipe))
        self._stopping = stopping = Stopping(
            job_end, output, loop, mpirun, signal_map, limits.grace, lambda: self._waits.lines()
        )
        requests = StackRequests(loop, partial(stopping.send, STACKS) if STACKS in signal_map else None)
        self._waits = WaitWatch(job_end, output, loop, mpirun, limits, requests, stopping.stop, self._kill)
        self._signals = signals
        loop.on_readable(signals, self._on_signals)
        senders: Mapping[str, Callable[[socket.socket], None]] = {
            STACKS_OF: self._waits.send_stacks,
            RECORD_OF: partial(self._send_record, None),
            VIEW_OF: partial(self._send_record, _VIEWED),
        }
        for what, listener in (clients or {}).items():
            if listener is not None:
                loop.on_readable(listener, partial(answer, listener, senders[what]))
        if hosts is not None:
            loop.on_readable(hosts, partial(stopping.on_hosts, hosts))

    def run(self) -> JobEnd:
        """Returns how the job has ended."""
        stop, size, kind = self._stopping.stop, self._job_end.size, self._job_end.roles.kind
        starting = f"chorosrun: starting {size} {kind(size)} …"
        if self._gate_is_open:
            self._loop.repeat("gate", durations.GATE_LOOK, self._mpirun.look)
        self._loop.set_deadline("progress", durations.SLOW_START, lambda: self._output.show(starting))
        self._loop.set_deadline("start", self._limits.start, lambda: stop(Reason.START_TIMEOUT))
        self._loop.set_deadline("run", self._limits.run, lambda: stop(Reason.TIMEOUT))
        end = time.monotonic() + (math.inf if self._limits.run is None else self._limits.run)
        try:
            with not_waiting(once=lambda: time.monotonic() > end or self._signals.has_more):
                self._loop.run(until=lambda: self._mpirun.has_ended() or not self._pipes)
            # mpirun has ended; its last output is in its pipes, which an ssh client may hold open for minutes.
            self._loop.cancel_all()
            self._loop.run(until=lambda: not self._pipes, seconds=durations.DRAIN)
            for pipe in self._frame_pipes:  # what is left in them: they do not end
                with suppress(BlockingIOError):
                    while True:
                        self._read(pipe)
        finally:
            self._loop.close()
            self._job_end.mpirun_code = self._mpirun.finish()
        self._waits.finish()
        for exit_ in self._job_end.exits.values():
            self._output.write_to_file(exit_.rank, exit_.traceback)
        self._output.finish()
        return self._job_end

    def _read(self, pipe: int) -> None:
        reader, data = self._readers[pipe], os.read(pipe, _PIPE_READ)
        if not data:
            self._loop.forget(pipe)
            self._pipes.discard(pipe)
        for item in reader.feed(data):
            if not isinstance(item, str):
                self._on_frame(item)
                continue
            self._job_end.messages.append(item)
            if self._verbose:
                self._output.show(item)

    def _on_signals(self) -> None:
        for number in self._signals.read():
            self._stopping.on_signal(number)

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Written(stream="result"):
                self._job_end.results.setdefault(frame.rank, bytearray()).extend(frame.data)
            case Written(stream="events"):
                for line in frame.data.splitlines():
                    with suppress(ValueError):  # from another version of choros on another host
                        event = Event.from_json(line)
                        events.publish(event)
                        self._job_end.note(frame.rank, event)
                        self._waits.note(frame.rank, event)
                        if event.kind is Kind.METRICS:
                            self._record.note_metrics(event)
            case Written():
                self._output.write(frame)
                self._write_due()
            case Start():
                self._on_start(frame)
            case RankProgress():
                self._record.note(frame)
                self._waits.note_progress(frame)
            case Stacks():
                self._waits.stacks.note(frame)
            case Received() if self._payload is not None:
                self._payload.note_received(frame.count)
            case Exit():
                self._on_exit(frame)

    def _write_due(self) -> None:
        self._output.write_due()
        self._loop.set_deadline("lines", self._output.due_after(), self._write_due)

    def _on_start(self, frame: Start) -> None:
        if self._gate_is_open:
            self._close_gate()
        self._job_end.started[frame.rank] = frame
        self._record.start(frame)
        if frame.added:
            self._job_end.replace(frame.rank)
            self._waits.replaced(frame.rank)
            self._end_unneeded({frame.rank})
            self._output.show(
                f"chorosrun: a new rank {frame.rank} was started on {frame.host}; it joins when it is ready."
            )
        publish(Kind.RANK_STARTED, frame.rank, frame.host, pid=frame.pid, restarts=frame.restarts)
        self._loop.cancel("progress")
        if frame.restarts:
            self._output.show(
                f"chorosrun: {self._job_end.roles.name(frame.rank)} on {frame.host} was killed by "
                f"{signal_name(frame.signal)} (signal {frame.signal}) and was restarted (restart {frame.restarts})."
            )
            return
        if frame.rank == 0 and self._payload is not None:
            self._payload.start()
        if len(self._job_end.started) == self._job_end.size and not frame.added:
            self._loop.cancel("start")
            self._stopping.all_have_started()

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
        job_end, rank = self._job_end, frame.rank
        if rank in job_end.exits:  # a wrapper repeats its report until it is released
            return
        if rank in self._unneeded:
            frame = replace(frame, code=0, signal=0, traceback="")
        elif not frame.stopped:
            job_end.newcomers.discard(rank)
        job_end.exits[rank] = frame
        publish(Kind.RANK_ENDED, rank, frame.host, code=frame.code, signal=frame.signal, seconds=frame.seconds)
        if job_end.is_saving:
            self._waits.ended(rank)
        if frame.code not in (0, PREEMPTED) and job_end.elastic is not None:
            self._on_loss(frame, job_end.elastic)
        if not job_end.missing:
            self._stopping.release()
        elif job_end.chief_is_done:  # the others detect the end of the chief and end, too
            if rank == 0:
                self._loop.cancel("run")
                self._loop.set_deadline("chief", self._limits.grace, lambda: self._stopping.stop(Reason.DONE))
        elif frame.code != 0 and job_end.elastic is None and met_shutdown(frame.traceback):
            # The rank that shut down ends by itself, and its exit code is the cause: wait for it.
            self._loop.set_deadline("failure", durations.SHUTDOWN, lambda: self._stopping.stop(Reason.FAILURE))
        elif frame.code != 0 and job_end.elastic is None:
            self._stopping.stop(Reason.FAILURE)
        elif not self._end_unneeded(job_end.newcomers & job_end.missing) and frame.code == 0:
            self._waits.ended(rank)

    def _end_unneeded(self, newcomers: set[int]) -> bool:
        """Ends the processes that were to become ranks once all ranks have ended; returns whether they have."""
        have_ended = self._job_end.missing <= newcomers | self._unneeded
        for newcomer in newcomers - self._unneeded if have_ended else ():
            self._unneeded.add(newcomer)
            self._job_end.done.add(newcomer)  # so that it is no loss if mpirun fails now
            self._kill(newcomer)
        return have_ended

    def _send_record(self, moments: int | None, client: socket.socket) -> None:
        send_text(client, json.dumps(self._record.to_json(moments)))

    def _kill(self, rank: int) -> None:
        start = self._job_end.started[rank]
        if not kill_rank(start, self._job):
            self._on_exit(Exit(rank, start.host, 128 + signal.SIGKILL, signal=signal.SIGKILL))

    def _on_loss(self, end: Exit, elastic: Elastic) -> None:
        job_end, roles = self._job_end, self._job_end.roles
        if job_end.reason is not None or end.stopped:  # stopped by its wrapper, which has lost mpirun
            return
        if end.code == PeerLostError.exit_code and len(job_end.hosts) > 1:
            # Those that have lost others, too, say so first: what they cannot reach decides where the job goes on.
            self._loop.set_deadline("lost", durations.LOST, lambda: self._stopping.stop(Reason.LOST))
            return
        if job_end.left < elastic.least:
            self._stopping.stop(Reason.TOO_FEW)
            return
        running = len(job_end.missing)
        go_on = f"{running} {roles.kind(running)} go{'es' * (running == 1)} on" if running else "the others have ended"
        how = f"rank {end.rank} was killed" if end.rank in self._waits.killed else headline(end, roles)
        self._output.show(f"chorosrun: {how}; {go_on}.")
        if end.traceback:
            self._output.show(end.traceback)
        self._waits.ended(end.rank, f"failed with exit code {end.code}")
