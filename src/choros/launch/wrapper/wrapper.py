"""The wrapper: one beside each rank, between mpirun and the user's command.

::

    chorosrun ──1──► mpirun ──2──► wrapper ──3──► COMMAND, the rank ──► its own children
        ▲               │             │      ▲                │
        ├── frames ◄────┴── stdout ◄──┤      └── its stdout and stderr, through pipes
        └── on one host, past mpirun ◄┘

    for the ranks  chorosrun sends mpirun   mpirun sends every wrapper   the wrapper sends the rank's group
                   SIGUSR1, SIGUSR2         the same                     the same
                   SIGALRM                  SIGALRM                      SIGINT
                   SIGABRT                  SIGABRT                      SIGTERM
                   SIGURG                   SIGURG                       SIGKILL; after its end: release
                   SIGVTALRM                SIGVTALRM                    SIGWINCH: commit and end, as hosts have changed
                   SIGPROF                  SIGPROF                      nothing: it sends the rank's stacks
                   SIGTERM                  SIGTERM, SIGKILL 0.25 s on   SIGTERM, SIGKILL 0.1 s on; elastic: SIGKILL
    from anybody else                       SIGTERM                      SIGTERM, as if it had been sent there

When mpirun receives SIGINT or SIGTERM, it kills the job, which leaves no time to save; so chorosrun sends other
signals for these two, which mpirun forwards.

The end of a rank is always the same: its remaining child processes are ended, its last output is read, an ``Exit``
frame reports the end to chorosrun, and then the wrapper *waits* until chorosrun releases it. Otherwise mpirun would
kill the other ranks a quarter of a second after the first wrapper ended with an error or without ``MPI_Finalize``;
chorosrun decides how much time they have.

In a job with parameter servers, a worker ended by a signal that chorosrun did not send is restarted; the wrapper, and
so the job, continues.

In an elastic job the others go on without a rank that dies, and learn from mpirun that it is dead: so the wrapper ends
when its rank does, by SIGKILL if the rank has failed, since mpirun ends a job in which a process fails in another way.
A rank that is added, or takes the place of one that died, is started by another one, with a wrapper of its own.

No rank outlives the job: arrows 1 and 3 have a parent-death guard (the kernel kills the child when its parent dies),
and for arrow 2 the kernel wakes the wrapper when mpirun dies. Where the kernel cannot, the wrapper polls twice a
second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from choros.config import NEW_RANK, SPAWN, STALL_SECONDS, STALL_SHUTDOWN_SECONDS
from choros.errors import ChorosError, LaunchError
from choros.launch.plan.cluster import role_in, task_environment
from choros.launch.plan.cores import share_of
from choros.launch.plan.roles import WORKER
from choros.launch.plan.settings import horovod_variables, rank_settings
from choros.launch.processes.directories import (
    SESSION,
    VARIABLE,
    Directory,
    remove_owned,
    remove_stale,
    segment_suffix,
    shared_memory,
)
from choros.launch.processes.parent_death_guard import (
    allow_tracing,
    become_subreaper,
    die_with_parent,
    signal_at_parent_death,
)
from choros.launch.processes.pipes import enlarge, open_frame_pipe
from choros.launch.processes.process_tree import end_children, group_exists, signal_group
from choros.launch.protocol.frames import Events, Exit, Frame, RankProgress, Stacks, Start, encode
from choros.launch.protocol.wrapper_options import RESULT_FD, SIGNAL_MEANINGS, STACKS, WrapperOptions
from choros.launch.wrapper.open_mpi_fixes import repairs
from choros.launch.wrapper.task_address import listening_problem
from choros.launch.wrapper.transcript import ERR, EVENTS, OUT, RESULT, Transcript
from choros.observe import EVENTS_FD, EVERY_EVENT, MOVE
from choros.observe.events import Event, Kind
from choros.observe.progress import PAGE_BYTES, PROGRESS_FD, PageContents, note_end, read_page
from choros.observe.stacks import state_of, take_stacks
from choros.topology import Topology, detect
from choros.transport.loop import HasFileno, Loop
from choros.transport.signal_pipe import SignalPipe, read_sender, signal_with_sender, wake_only

__all__ = ["Wrapper", "main"]

_POLL_SECONDS = 0.5
_ORPHANS_GRACE = 0.5
#: The failure of this rank soon makes other ranks fail: report it before they do.
_ORPHANS_GRACE_AFTER_FAILURE = 0.1
_KILL_SECONDS = 0.1
_REPORT_AGAIN_SECONDS = 2.0
_PIPE_READ = 1 << 16
#: After a read smaller than this, wait for more data to fill a frame: one frame per line costs ten times as much.
_SMALL_READ = 1 << 14
_BATCH_SECONDS = 0.002
_PROGRESS_SECONDS = 60.0
#: After a signal to end, a rank whose data do not move for so long reports it: it may wait for one that has ended.
_STUCK_SECONDS = 1.0


class _NotStarted(LaunchError):
    """The command could not be started."""

    def __init__(self, message: str, exit_code: int = LaunchError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Wrapper:
    """Runs one rank's command, reports it to chorosrun, and ends it on chorosrun's signal."""

    def __init__(self, topology: Topology, options: WrapperOptions, command: list[str]) -> None:
        self._topology = topology
        self._options = options
        self._command = command
        self._environ: dict[str, str] = {}
        self._restarts = 0
        self._host = os.environ.get("PMIX_HOSTNAME") or os.uname().nodename
        self._mpirun = os.getppid()
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._stopped = False
        self._received: set[int] = set()
        self._reported = False
        self._released = False
        self._early: list[int] = []
        self._transcript = Transcript(topology.rank)
        self._frames = open_frame_pipe(os.environ, topology.rank) or 1  # standard output
        self._loop = Loop(None)  # idle while the rank computes
        self._pipes: set[HasFileno | int] = set()
        self._memory: Directory | None = None
        self._page: int | None = None
        self._stalled = ""
        self._began = time.monotonic()

    def run(self) -> int:
        """Runs the command to its end; returns its exit code."""
        self._listen()
        try:
            self._prepare()
            self._run_once()
            while self._may_run_again():
                self._restarts += 1
                self._run_once()
        except ChorosError as error:
            report = Exit(self._topology.rank, self._host, error.exit_code, problem=str(error))
        except OSError as error:  # too many open files, no memory
            problem = f"the rank cannot be started: {error}."
            report = Exit(self._topology.rank, self._host, LaunchError.exit_code, problem=problem)
        else:
            report = self._report()
        self._reported = True
        self._send_progress()
        self._send(report)
        if self._options.elastic and not self._released:
            self._clean_up()
            if report.code:
                os.kill(os.getpid(), signal.SIGKILL)
            return 0
        while not self._released:
            self._loop.run(until=lambda: self._released, seconds=_REPORT_AGAIN_SECONDS)
            self._send(report)  # repeated, because the job cannot end without it
        self._clean_up()
        return report.code

    # signals ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Installs the signal handlers, which wake the loop; from now on no signal ends the wrapper by itself."""
        handlers = dict.fromkeys(SIGNAL_MEANINGS, self._on_signal)
        senders = signal_with_sender(signal.SIGTERM)
        if senders is None:
            handlers[signal.SIGTERM] = self._on_signal
        else:
            self._loop.on_readable(senders, partial(self._on_sender, senders))
        pipe = SignalPipe({**handlers, signal.SIGCHLD: wake_only, STACKS: self._on_stacks_wanted})
        pipe.open()  # never closed: a later signal would end the wrapper
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self._loop.on_readable(pipe, partial(self._on_wake_up, pipe))
        # The signal only wakes the loop; _check_parent detects whether mpirun has ended.
        wakes_at_parent_death = signal_at_parent_death(signal.SIGCHLD) and os.getppid() == self._mpirun
        if not wakes_at_parent_death:
            self._loop.repeat("parent", _POLL_SECONDS, self._check_parent)

    def _on_wake_up(self, pipe: SignalPipe) -> None:
        pipe.read()  # the signals' handlers have run; SIGCHLD is left: a child or mpirun has ended
        self._reap()
        self._check_parent()

    def _on_sender(self, senders: int) -> None:
        """SIGTERM has arrived: mpirun ends the job, or somebody ends this rank, by its wrapper."""
        if read_sender(senders) == self._mpirun:
            self._on_signal(signal.SIGTERM, None)
        elif self._process is None:  # nothing that could end in order
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._status is None:
            signal_group(self._process.pid, signal.SIGTERM)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:  # from mpirun itself: SIGKILL follows at once
            self._released = True
            if self._options.elastic:  # the job is started again: this rank must not seem to have been asked to leave
                self._stop_now()
                return
            self._loop.repeat("kill", _KILL_SECONDS, self._stop_now)
            self._forward(signal.SIGTERM)
            return
        meaning = SIGNAL_MEANINGS[signal.Signals(number)]
        if meaning == signal.SIGKILL and self._reported:
            self._released = True
        self._forward(meaning)

    def _on_stacks_wanted(self, _number: int, _frame: object) -> None:
        self._loop.set_deadline("stacks", 0.0, self._send_stacks)

    def _send_stacks(self) -> None:
        if self._process is not None and self._status is None:
            self._send_progress()
            pid = self._process.pid
            self._send(Stacks(self._topology.rank, state_of(pid), take_stacks(pid)))

    def _forward(self, number: int) -> None:
        self._received.add(number)
        if self._process is None:
            self._early.append(number)
            return
        if self._status is not None:
            return
        if number in (signal.SIGTERM, signal.SIGUSR1) and self._page is not None:
            note_end(self._page)
        if number not in (signal.SIGUSR1, signal.SIGUSR2, MOVE):
            self._stopped = True
            self._loop.set_deadline("data", _STUCK_SECONDS, lambda: self._check_data(_STUCK_SECONDS))
        signal_group(self._process.pid, number)

    # the command --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepares the host and the command's environment; raises if the command cannot be started."""
        become_subreaper()
        if self._topology.local_rank == 0:
            remove_stale()
        problem = listening_problem(os.environ, self._topology.rank)
        if problem:
            raise _NotStarted(problem)
        share = share_of(self._topology.local_rank, self._topology.local_size, self._options.bind)
        if share.bind and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, share.bind)
        environ = task_environment(os.environ, self._topology.rank)
        if role_in(os.environ, self._topology.rank) is None:
            environ |= horovod_variables(self._topology, self._host, environ)
        self._memory = shared_memory(environ, self._topology.local_size)
        if self._memory is not None:
            environ[VARIABLE] = str(self._memory.path)
            session = _session()
            if session is not None and not session.name.startswith(SESSION):  # that one is chorosrun's to remove
                self._memory.note_daemon(session)
        if self._options.elastic:
            environ[SPAWN.name] = json.dumps(self._spawn_command())
        one_host = self._topology.local_size == self._topology.size
        environ |= rank_settings(
            environ, share, one_host=one_host, elastic=self._options.elastic, has_memory=VARIABLE in environ
        )
        self._environ = environ | self._way_to_mpirun()

    def _way_to_mpirun(self) -> dict[str, str]:
        """The variables that lead the rank to mpirun, if that is behind a gate."""
        if not self._options.gated or role_in(os.environ, self._topology.rank) is not None:
            return {}
        from choros.launch.wrapper.pmix_proxy import PmixProxy  # imports sockets

        return PmixProxy(os.environ).variables

    def _run_once(self) -> None:
        """Runs the command until it and its process tree have ended and all of its output has been read."""
        ended_by = -(self._status or 0)
        self._process = self._status = None
        self._send_all(self._transcript.release())
        self._transcript = Transcript(self._topology.rank)
        process = self._start()
        added = bool(self._options.new_rank)
        self._send(Start(self._topology.rank, self._host, process.pid, self._restarts, ended_by, added))
        self._loop.repeat("progress", _PROGRESS_SECONDS, self._send_progress)
        limits = [each.number(self._environ, "seconds") for each in (STALL_SECONDS, STALL_SHUTDOWN_SECONDS)]
        self._check_data(min(filter(None, limits), default=0.0))
        self._loop.run(until=lambda: self._status is not None)
        self._end_process_tree()
        self._drain()

    def _start(self) -> subprocess.Popen[bytes]:
        environ = dict(self._environ)
        pipes = [(EVENTS, EVENTS_FD, EVERY_EVENT if self._options.events else "")]
        pipes += [(RESULT, RESULT_FD, "")] if self._options.result else []
        readers: dict[str, int] = {}
        writers: list[int] = []
        for name, variable, suffix in pipes:
            readers[name], writer = os.pipe()
            writers.append(writer)
            os.set_inheritable(writer, True)
            environ[variable] = f"{writer}{suffix}"
        self._page = _memory(PAGE_BYTES, self._page)
        if self._page is not None:
            environ[PROGRESS_FD] = str(self._page)
        wrapper = os.getpid()
        try:
            self._process = process = subprocess.Popen(
                self._command,
                env=environ,
                stdin=None if self._options.stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                close_fds=False,  # Hydra's ranks communicate with it through an inherited descriptor
                preexec_fn=lambda: _become_rank(wrapper),
            )
        except OSError as error:
            raise _start_error(self._command[0], error) from error
        finally:
            for writer in writers:
                os.close(writer)
        for name, pipe in ((OUT, process.stdout), (ERR, process.stderr), *readers.items()):
            if pipe is not None:
                if name in (OUT, ERR):
                    enlarge(pipe, self._topology.local_size)
                self._pipes.add(pipe)
                self._loop.on_readable(pipe, partial(self._read, name, pipe))
        early, self._early = self._early, []
        for number in early:
            self._forward(number)
        return process

    def _spawn_command(self) -> list[str]:
        """Returns the argv that starts a further rank of an elastic job; ``{new_rank}`` stands for that option."""
        options = replace(self._options, new_rank=(), stdin=False, ranks_per_host=()).arguments()
        return [sys.executable, "-I", "-S", sys.argv[0], *options, "--new-rank={new_rank}", "--", *self._command]

    def _send_progress(self) -> None:
        """Sends what the rank has written to its page, if it has."""
        done = self._done()
        if done.last:
            counts = (done.steps, done.prompt_steps, done.seconds, done.waiting, done.loading)
            ago = round(max(0.0, time.time() - done.last_time), 3)
            self._send(RankProgress(self._topology.rank, *counts, last=done.last, ago=ago))

    def _check_data(self, stall: float) -> None:
        """Reports that the data of a collective move for longer than ``stall`` seconds.

        All ranks have called it, and wait in C, for one that is stopped or lost: they cannot report it themselves.
        """
        if not stall or self._status is not None:
            return
        done, now = self._done(), time.time()
        seconds = now - done.last_time
        moves = done.moves and done.last_size > 1
        stalled = done.last if moves and seconds >= stall else ""
        for kind, call in ((Kind.WAITED, self._stalled), (Kind.WAITING, stalled)):
            if call and (self._stalled != stalled or (kind is Kind.WAITING and self._stopped)):
                event = Event(kind, call, self._topology.rank, now, {"seconds": seconds, "matched": done.last_size})
                self._send(Events(self._topology.rank, event.to_json() + "\n"))
        self._stalled = stalled
        after = stall - seconds if moves and not stalled else stall / 2
        self._loop.set_deadline("data", min(max(after, 0.1), stall / 2), lambda: self._check_data(stall))

    def _done(self) -> PageContents:
        """What the rank has written to its page."""
        return read_page(os.pread(self._page, PAGE_BYTES, 0)) if self._page is not None else PageContents()

    def _may_run_again(self) -> bool:
        """Returns whether this is a worker that may be restarted: ended by a signal that chorosrun did not send."""
        role = role_in(os.environ, self._topology.rank)
        if role is None or role.name != WORKER or self._restarts >= self._options.restarts:
            return False
        ended_by = -(self._status or 0)
        ended = self._received & {signal.SIGINT, signal.SIGTERM, signal.SIGKILL}
        return ended_by > 0 and ended_by not in self._received and not ended and not self._released

    # the command's output and its end -------------------------------------------------------------

    def _read(self, name: str, pipe: HasFileno | int) -> None:
        data = os.read(pipe if isinstance(pipe, int) else pipe.fileno(), _PIPE_READ)
        if not data:
            self._loop.forget(pipe)
            self._pipes.discard(pipe)
        elif len(data) < _SMALL_READ:
            self._loop.forget(pipe)
            read_on = partial(self._loop.on_readable, pipe, partial(self._read, name, pipe))
            self._loop.set_deadline(f"read {name}", _BATCH_SECONDS, read_on)
        self._send_all(self._transcript.feed(name, data, time.monotonic()))
        self._wait_for_due()

    def _send_due(self) -> None:
        if self._status is None:  # the last output of a rank that has ended is part of its report
            self._send_all(self._transcript.due(time.monotonic()))
            self._wait_for_due()

    def _wait_for_due(self) -> None:
        """Schedules the sending of the lines that the transcript holds back."""
        waits = self._transcript.waits(time.monotonic())
        if waits:
            self._loop.set_deadline("due", min(waits), self._send_due)
        else:
            self._loop.cancel("due")

    def _reap(self) -> None:
        """Waits for children that have ended: the rank, and its orphans, which this process has inherited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._process is not None and pid == self._process.pid:
                self._status = self._process.returncode = os.waitstatus_to_exitcode(status)

    def _check_parent(self) -> None:
        if os.getppid() != self._mpirun:
            self._released = True
            self._stop_now()

    def _stop_now(self) -> None:
        if self._process is not None and self._status is None:
            self._stopped = True
            signal_group(self._process.pid, signal.SIGKILL)

    # the end ------------------------------------------------------------------------------------

    def _end_process_tree(self) -> None:
        """Ends the rank's child processes by SIGKILL, after a moment in which resource trackers end by themselves."""
        assert self._process is not None  # noqa: S101  (only called once it has run)
        group = self._process.pid
        grace = _ORPHANS_GRACE if self._status == 0 else _ORPHANS_GRACE_AFTER_FAILURE
        self._loop.run(until=lambda: not group_exists(group) or self._released, seconds=grace)
        signal_group(group, signal.SIGKILL)
        end_children(self._reap)

    def _drain(self) -> None:
        """Reads the rest of the pipes, whose writers have ended."""
        self._loop.run(until=lambda: not self._pipes, seconds=1.0)

    def _report(self) -> Exit:
        status = self._status or 0
        return Exit(
            self._topology.rank,
            self._host,
            code=status if status >= 0 else 128 - status,
            signal=max(0, -status),
            stopped=self._stopped,
            traceback=self._transcript.traceback,
            shown=self._transcript.shown,
            tail=self._transcript.tail,
            seconds=round(time.monotonic() - self._began, 3),
            restarts=self._restarts,
        )

    def _send_all(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self._send(frame)

    def _send(self, frame: Frame) -> None:
        """Writes a frame to chorosrun or mpirun; if that no longer reads, the job is over."""
        data = memoryview(encode(frame))
        try:
            while data:
                data = data[os.write(self._frames, data) :]
        except OSError:
            self._released = True
            self._stop_now()

    def _clean_up(self) -> None:
        """Removes this rank's shared memory, and mpirun's directory if mpirun is dead."""
        if self._memory is not None:
            self._memory.release(segment_suffix(os.environ, self._topology.local_rank))
        session = _session()
        if os.getppid() != self._mpirun and session is not None:  # mpirun is dead and cannot do it
            remove_owned(session)


def _session() -> Path | None:
    """Returns the directory of mpirun, or of its daemon on this host."""
    session = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
    if not session.is_absolute():
        return None
    return session.parent if session.parent.name.startswith(SESSION) else session


def _memory(size: int, old: int | None) -> int | None:
    """Returns the descriptor of a file of ``size`` zeros in memory, for children, too; ``None`` if there is none."""
    if old is not None:
        os.close(old)
    if not hasattr(os, "memfd_create"):  # not on macOS
        return None
    try:
        descriptor = os.memfd_create("choros progress", 0)
        os.ftruncate(descriptor, size)
    except OSError:
        return None
    return descriptor


def _become_rank(wrapper: int) -> None:
    """Sets the parent-death guard and the default signal handlers; runs in the child, before the command."""
    die_with_parent(wrapper)
    allow_tracing(wrapper)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _start_error(program: str, error: OSError) -> _NotStarted:
    if isinstance(error, PermissionError):
        return _NotStarted(f"{program!r} is not executable.", 126)
    if isinstance(error, FileNotFoundError):
        return _NotStarted(f"command not found: {program!r}.", 127)
    return _NotStarted(f"{program!r} cannot be started: {error.strerror or error}.", 127)


def main() -> None:
    """Runs the wrapper with the options and the command in ``sys.argv``."""
    options, command = WrapperOptions.parse(sys.argv[1:])
    os.environ.update(repairs(os.environ, options.ranks_per_host))
    if options.new_rank:
        os.environ[NEW_RANK.name] = ",".join(map(str, options.new_rank))
    try:
        topology = detect(os.environ)
    except ChorosError as error:
        sys.exit(f"choros: {error}")
    os._exit(Wrapper(topology, options, command).run())
