"""The worker wrapper: one beside each rank, between mpirun and the user's command.

::

    chorosrun ──1──► mpirun ──2──► worker wrapper ──3──► COMMAND, the rank ──► its own children
        ▲               │             │      ▲                │
        └── frames ◄────┴── stdout ◄──┘      └── its stdout and stderr, through pipes

    to the ranks   chorosrun sends mpirun   mpirun sends every wrapper   the wrapper sends the rank's group
                   SIGUSR1, SIGUSR2         the same                     the same
                   SIGALRM                  SIGALRM                      SIGINT
                   SIGABRT                  SIGABRT                      SIGTERM
                   SIGURG                   SIGURG                       SIGKILL; when it has ended: let go
                   SIGTERM                  SIGTERM, SIGKILL 0.25 s on   SIGTERM, SIGKILL 0.1 s on

mpirun kills the job when it is asked to end with SIGINT or SIGTERM, which leaves no time to save; so these two
travel in the guise of signals that it passes on.

A rank ends in the same way however it ends: every process it started is stopped, what it wrote last is read,
one ``Exit`` frame tells chorosrun, and then the wrapper *stays* until chorosrun lets it go. mpirun would kill
the other ranks a quarter of a second after the first wrapper ends with an error, or ends without
``MPI_Finalize``; how long they have is chorosrun's to say.

Beside parameter servers, a worker that a signal has ended, and not one of ours, is started again; the wrapper, and
so the job, stays.

No rank is left behind: 1 and 3 are tethered (the kernel kills the child when its parent dies), and across 2
the kernel wakes the wrapper when mpirun dies. Where it cannot, the wrapper checks twice a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from choros.errors import ChorosError, LaunchError
from choros.launch.plan.cluster import role_in, task_environment
from choros.launch.plan.cores import share_of
from choros.launch.plan.roles import WORKER
from choros.launch.plan.settings import rank_settings
from choros.launch.processes.directories import SESSION, VARIABLE, Directory, remove_stale, shared_memory
from choros.launch.processes.parent_death_guard import adopt_orphans, die_with_parent, signal_at_parent_death
from choros.launch.processes.process_tree import end_children, group_exists, signal_group
from choros.launch.protocol.frames import Exit, Frame, Start, encode
from choros.launch.protocol.wrapper_options import CARRIED, RESULT_FD, Options
from choros.launch.wrapper.open_mpi_fixes import repairs
from choros.launch.wrapper.task_address import why_not_listening
from choros.launch.wrapper.transcript import ERR, EVENTS, OUT, RESULT, Transcript
from choros.observe import EVENTS_FD
from choros.topology import Topology, detect
from choros.transport.loop import HasFileno, Loop
from choros.transport.signal_pipe import SignalPipe, wake_only

__all__ = ["Wrapper", "main"]

_POLL = 0.5
_ORPHANS_GRACE = 0.5
#: What killed this rank will soon be felt by others: be the first to report it.
_ORPHANS_GRACE_AFTER_FAILURE = 0.1
_LAST_WORDS = 0.1
_REPEAT = 2.0
_PIPE_READ = 1 << 16
#: After less than this from a pipe, more may come together in a moment: a frame a line costs ten times as much.
_LITTLE = 1 << 14
_MOMENT = 0.002


class _NotStarted(LaunchError):
    """The command could not be started."""

    def __init__(self, message: str, exit_code: int = LaunchError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Wrapper:
    """Runs one rank's command, tells chorosrun about it, and ends it when told to."""

    def __init__(self, place: Topology, options: Options, command: list[str]) -> None:
        self._place = place
        self._options = options
        self._command = command
        self._environ: dict[str, str] = {}
        self._restarts = 0
        self._host = os.environ.get("PMIX_HOSTNAME") or os.uname().nodename
        self._mpirun = os.getppid()
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._stopped = False
        self._told: set[int] = set()
        self._reported = False
        self._released = False
        self._early: list[int] = []
        self._transcript = Transcript(place.rank)
        self._loop = Loop(None)  # idle while the rank computes
        self._pipes: set[HasFileno | int] = set()
        self._memory: Directory | None = None
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
            report = Exit(self._place.rank, self._host, error.exit_code, problem=str(error))
        else:
            report = self._report()
        self._reported = True
        self._send(report)
        while not self._released:
            self._loop.run(until=lambda: self._released, seconds=_REPEAT)
            self._send(report)  # again and again: it is what the job's end hangs on
        self._clean_up()
        return report.code

    # signals ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Has signals wake the loop; from now on none ends the wrapper by itself."""
        passed_on = dict.fromkeys((*CARRIED, signal.SIGTERM), self._on_signal)
        pipe = SignalPipe({**passed_on, signal.SIGCHLD: wake_only})
        pipe.open()  # never closed: a signal that came after that would end the wrapper
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self._loop.on_readable(pipe, partial(self._on_wake_up, pipe))
        # The signal only wakes the loop: whether mpirun has ended is for _check_parent to find out.
        wakes_at_parent_death = signal_at_parent_death(signal.SIGCHLD) and os.getppid() == self._mpirun
        if not wakes_at_parent_death:
            self._loop.repeat("parent", _POLL, self._check_parent)

    def _on_wake_up(self, pipe: SignalPipe) -> None:
        pipe.read()  # their handlers have run; what is left are the children that have ended, and mpirun
        self._reap()
        self._check_parent()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM:  # from mpirun itself: SIGKILL follows at once
            self._loop.repeat("last words", _LAST_WORDS, self._stop_now)
            self._released = True
            self._pass_on(signal.SIGTERM)
            return
        meaning = CARRIED[signal.Signals(number)]
        if meaning == signal.SIGKILL and self._reported:
            self._released = True
        self._pass_on(meaning)

    def _pass_on(self, number: int) -> None:
        self._told.add(number)
        if self._process is None:
            self._early.append(number)
            return
        if self._status is not None:
            return
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._stopped = True
        signal_group(self._process.pid, number)

    # the command --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Gets the host, and the command's environment, ready; an error says why the command cannot be started."""
        adopt_orphans()
        if self._place.local_rank == 0:
            remove_stale()
        problem = why_not_listening(os.environ, self._place.rank)
        if problem:
            raise _NotStarted(problem)
        share = share_of(self._place.local_rank, self._place.local_size, self._options.bind)
        if share.bind and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, share.bind)
        environ = task_environment(os.environ, self._place.rank)
        environ |= rank_settings(environ, share, one_host=self._place.local_size == self._place.size)
        self._memory = shared_memory(environ)
        if self._memory is not None:
            environ[VARIABLE] = str(self._memory.path)
        self._environ = environ

    def _run_once(self) -> None:
        """Runs the command, until it has ended with all that it had started and all that it wrote has been read."""
        ended_by = -(self._status or 0)
        self._process = self._status = None
        self._send_all(self._transcript.release())
        self._transcript = Transcript(self._place.rank)
        process = self._start()
        self._send(Start(self._place.rank, self._host, process.pid, self._restarts, ended_by))
        self._loop.run(until=lambda: self._status is not None)
        self._end_family()
        self._drain()

    def _start(self) -> subprocess.Popen[bytes]:
        environ = dict(self._environ)
        asked = ((RESULT, RESULT_FD, self._options.result), (EVENTS, EVENTS_FD, self._options.events))
        readers: dict[str, int] = {}
        writers: list[int] = []
        for name, variable, wanted in asked:
            if wanted:
                readers[name], writer = os.pipe()
                writers.append(writer)
                os.set_inheritable(writer, True)
                environ[variable] = str(writer)
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
                close_fds=False,  # Hydra's ranks talk to it through a descriptor they inherit
                preexec_fn=lambda: _become_rank(wrapper),
            )
        except OSError as error:
            raise _why_not_started(self._command[0], error) from error
        finally:
            for writer in writers:
                os.close(writer)
        for name, pipe in ((OUT, process.stdout), (ERR, process.stderr), *readers.items()):
            if pipe is not None:
                self._pipes.add(pipe)
                self._loop.on_readable(pipe, partial(self._read, name, pipe))
        early, self._early = self._early, []
        for number in early:
            self._pass_on(number)
        return process

    def _may_run_again(self) -> bool:
        """Whether this is a worker that a signal has ended which was none of ours, and may be started once more."""
        role = role_in(os.environ, self._place.rank)
        if role is None or role.name != WORKER or self._restarts >= self._options.restarts:
            return False
        ended_by = -(self._status or 0)
        ended = self._told & {signal.SIGINT, signal.SIGTERM, signal.SIGKILL}
        return ended_by > 0 and ended_by not in self._told and not ended and not self._released

    # what it writes, and its end -----------------------------------------------------------------

    def _read(self, name: str, pipe: HasFileno | int) -> None:
        data = os.read(pipe if isinstance(pipe, int) else pipe.fileno(), _PIPE_READ)
        if not data:
            self._loop.forget(pipe)
            self._pipes.discard(pipe)
        elif len(data) < _LITTLE:
            self._loop.forget(pipe)
            read_on = partial(self._loop.on_readable, pipe, partial(self._read, name, pipe))
            self._loop.set_deadline(f"read {name}", _MOMENT, read_on)
        self._send_all(self._transcript.feed(name, data, time.monotonic()))
        self._wait_for_due()

    def _send_due(self) -> None:
        if self._status is None:  # what a rank that has ended wrote last is its report's
            self._send_all(self._transcript.due(time.monotonic()))
            self._wait_for_due()

    def _wait_for_due(self) -> None:
        """Has what the transcript keeps back sent when its time comes."""
        waits = self._transcript.waits(time.monotonic())
        if waits:
            self._loop.set_deadline("due", min(waits), self._send_due)
        else:
            self._loop.cancel("due")

    def _reap(self) -> None:
        """Takes note of ended children: the rank, and orphans of its that are ours now."""
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

    def _end_family(self) -> None:
        """Ends what the rank started: a moment to end by themselves (resource trackers tidy up), then by force."""
        assert self._process is not None  # noqa: S101  (only called once it has run)
        group = self._process.pid
        patience = _ORPHANS_GRACE if self._status == 0 else _ORPHANS_GRACE_AFTER_FAILURE
        self._loop.run(until=lambda: not group_exists(group) or self._released, seconds=patience)
        signal_group(group, signal.SIGKILL)
        end_children(self._reap)

    def _drain(self) -> None:
        """Reads what is left in the pipes; nobody writes to them any more."""
        self._loop.run(until=lambda: not self._pipes, seconds=1.0)

    def _report(self) -> Exit:
        status = self._status or 0
        return Exit(
            self._place.rank,
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
        """Writes a frame to mpirun; if nobody reads any more, the job is over."""
        data = memoryview(encode(frame))
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:
            self._released = True
            self._stop_now()

    def _clean_up(self) -> None:
        """Removes what the job has left in this host's memory; the last rank of the host finds it empty."""
        if self._memory is not None:
            self._memory.leave(self._place.local_rank)
        session = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
        if os.getppid() != self._mpirun and session.is_absolute():  # mpirun is gone and cannot do it
            ours = session.parent.name.startswith(SESSION)
            import shutil  # with three compression libraries, for once in a while

            shutil.rmtree(session.parent if ours else session, ignore_errors=True)


def _become_rank(wrapper: int) -> None:
    """Runs in the child, before the command."""
    die_with_parent(wrapper)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _why_not_started(program: str, error: OSError) -> _NotStarted:
    if isinstance(error, PermissionError):
        return _NotStarted(f"{program!r} is not executable.", 126)
    if isinstance(error, FileNotFoundError):
        return _NotStarted(f"there is no command {program!r}.", 127)
    return _NotStarted(f"{program!r} cannot be started: {error.strerror or error}.", 127)


def main() -> None:
    """Runs the rank given on the command line."""
    options, command = Options.parse(sys.argv[1:])
    os.environ.update(repairs(os.environ, options.ranks_per_host))
    try:
        place = detect(os.environ)
    except ChorosError as error:
        sys.exit(f"choros: {error}")
    os._exit(Wrapper(place, options, command).run())
