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

mpirun kills a job at SIGINT or SIGTERM, with no time to save: chorosrun sends others, which mpirun forwards. Once
its rank has ended, the wrapper ends its children, reads its output, sends ``Exit`` and *waits* for release: else
mpirun would kill the others 0.25 s after the first that ends with an error or without ``MPI_Finalize``.
In an elastic job it ends with its rank, by SIGKILL if that failed: mpirun ends a job that fails in another way.
With parameter servers, a worker ended by a signal not from chorosrun is restarted. No rank outlives the job: arrows
1 and 3 have a parent-death guard; the kernel wakes the wrapper when mpirun dies, or it polls twice a second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from choros import durations
from choros.errors import ChorosError, LaunchError
from choros.launch.plan.cores import Share, share_of
from choros.launch.plan.environment import horovod_variables, rank_settings
from choros.launch.plan.roles import CHIEF, WORKER, task_environment, task_in
from choros.launch.processes.directories import (
    SESSION,
    VARIABLE,
    Directory,
    remove_owned,
    remove_stale,
    segment_suffix,
    shared_memory,
)
from choros.launch.processes.pipes import enlarge, open_frame_pipe
from choros.launch.processes.process_tree import (
    CHILD_SUBREAPER,
    DEATH_SIGNAL,
    PTRACER,
    die_with_parent,
    end_children,
    group_exists,
    set_option,
    signal_group,
)
from choros.launch.protocol.frames import (
    ERR,
    EVENTS,
    OUT,
    RESULT,
    Exit,
    Frame,
    Received,
    Stacks,
    Start,
    encode,
)
from choros.launch.protocol.wrapper_options import RESULT_FD, SIGNAL_MEANINGS, STACKS, WrapperOptions
from choros.launch.wrapper.rank_output import RankOutput
from choros.observe import EVENTS_FD, EVERY_EVENT, MOVE
from choros.observe.processes import state_of, take_stacks
from choros.settings import VARIABLES, Config
from choros.topology import TFConfig, Topology, detect, split_address
from choros.topology.environments import OPEN_MPI
from choros.transport.loop import Loop, SignalPipe, read_sender, signal_with_sender, wake_only

_LOCAL_SIZES = (OPEN_MPI.local_size, "OMPI_WORLD_LOCAL_SIZE")


class Wrapper:
    """Runs one rank's command, reports it to chorosrun, and ends it on chorosrun's signal."""

    def __init__(self, topology: Topology, options: WrapperOptions, command: list[str]) -> None:
        self._topology = topology
        self._options = options
        self._command = command
        self._task: TFConfig | None = None
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
        self._frames = open_frame_pipe(os.environ, topology.rank) or 1  # standard output
        self._loop = Loop(None)  # idle while the rank computes
        self._output = RankOutput(topology.rank, self._loop, self._send, lambda: self._status is None)
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
            self._loop.run(until=lambda: self._released, seconds=durations.REPORT_AGAIN)
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
        on_stacks_wanted = lambda *_: self._loop.set_deadline("stacks", 0.0, self._send_stacks)  # noqa: E731
        # Never closed: a later signal would end the wrapper.
        pipe = SignalPipe({**handlers, signal.SIGCHLD: wake_only, STACKS: on_stacks_wanted})
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self._loop.on_readable(pipe, partial(self._on_wake_up, pipe))
        # The signal only wakes the loop; _check_parent detects whether mpirun has ended.
        wakes_at_parent_death = set_option(DEATH_SIGNAL, signal.SIGCHLD) and os.getppid() == self._mpirun
        if not wakes_at_parent_death:
            self._loop.repeat("parent", durations.PARENT_LOOK, self._check_parent)

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
            self._loop.repeat("kill", durations.KILL_AGAIN, self._stop_now)
            self._forward(signal.SIGTERM)
            return
        meaning = SIGNAL_MEANINGS[signal.Signals(number)]
        if meaning == signal.SIGKILL and self._reported:
            self._released = True
        self._forward(meaning)

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
        self._reap()  # a rank that has ended just before is not stopped by it
        if self._status is not None:
            return
        if number in (signal.SIGTERM, signal.SIGUSR1):
            self._output.note_end()
        if number not in (signal.SIGUSR1, signal.SIGUSR2, MOVE):
            self._stopped = True
            self._loop.set_deadline(
                "data", durations.STUCK, lambda: self._output.watch_data(durations.STUCK, repeat=True)
            )
        signal_group(self._process.pid, number)

    # the command --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        set_option(CHILD_SUBREAPER, 1)
        if self._topology.local_rank == 0:
            remove_stale()
        self._task = task_in(os.environ, self._topology.rank)
        problem = listening_problem(self._task)
        if problem:
            raise LaunchError(problem)
        share = share_of(self._topology.local_rank, self._topology.local_size, self._options.bind)
        if share.bind and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, share.bind)
        self._memory = _job_memory(self._topology.local_size)
        self._environ = self._command_environment(share)

    def _command_environment(self, share: Share) -> dict[str, str]:
        """Returns the whole environment of the rank's command."""
        topology, options, environ = self._topology, self._options, task_environment(os.environ, self._task)
        if self._task is None:
            environ |= horovod_variables(topology, self._host, environ)
        if self._memory is not None:
            environ[VARIABLE] = str(self._memory.path)
        if options.elastic:  # the argv that starts a further rank; {new_rank} stands for that option
            others = replace(options, new_rank="{new_rank}", ranks_per_host=())
            spawn = [sys.executable, "-I", "-S", sys.argv[0], str(others), *self._command]
            environ[VARIABLES["spawn"].name] = json.dumps(spawn)
        one_host, has_memory = topology.local_size == topology.size, VARIABLE in environ
        environ |= rank_settings(environ, share, one_host=one_host, elastic=options.elastic, has_memory=has_memory)
        if options.gated and self._task is None:  # mpirun is behind a gate
            from choros.launch.wrapper.pmix_proxy import start_proxy  # imports sockets

            environ |= start_proxy(os.environ)
        return environ

    def _run_once(self) -> None:
        """Runs the command until it and its process tree have ended and all of its output has been read."""
        ended_by = -(self._status or 0)
        self._process = self._status = None
        process = self._start()
        added = bool(self._options.new_rank)
        self._send(Start(self._topology.rank, self._host, process.pid, self._restarts, ended_by, added))
        self._loop.repeat("progress", durations.PROGRESS, self._send_progress)
        config = Config.from_environ(self._environ)
        limits = filter(None, (config.stall_seconds, config.stall_shutdown_seconds))
        self._output.watch_data(min(limits, default=0.0))
        self._loop.run(until=lambda: self._status is not None)
        self._end_process_tree()
        self._output.drain()
        if not self._status:  # it has handled its last exception
            self._output.release()

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {**self._environ, **self._output.restart()}
        pipes = [(EVENTS, EVENTS_FD, EVERY_EVENT if self._options.events else "")]
        pipes += [(RESULT, RESULT_FD, "")] if self._options.call else []
        writers: list[int] = []
        for name, variable, suffix in pipes:
            reader, writer = os.pipe()
            self._output.add(name, reader)
            writers.append(writer)
            os.set_inheritable(writer, True)
            environ[variable] = f"{writer}{suffix}"
        is_first = self._topology.rank == 0 and not self._options.new_rank
        gets_payload, wrapper = self._options.call and is_first, os.getpid()
        try:
            self._process = process = subprocess.Popen(
                self._command,
                env=environ,
                stdin=subprocess.PIPE if gets_payload else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                close_fds=False,  # Hydra's ranks communicate with it through an inherited descriptor
                preexec_fn=lambda: _become_rank(wrapper),
            )
        except OSError as error:
            program, code = self._command[0], 127
            problem = f"{program!r} cannot be started: {error.strerror or error}."
            if isinstance(error, FileNotFoundError):
                problem = f"command not found: {program!r}."
            elif isinstance(error, PermissionError):
                problem, code = f"{program!r} is not executable.", 126
            failed = LaunchError(problem)
            failed.exit_code = code
            raise failed from error
        finally:
            for writer in writers:
                os.close(writer)
        for name, pipe in ((OUT, process.stdout), (ERR, process.stderr)):
            assert pipe is not None  # noqa: S101  (as requested)
            enlarge(pipe, self._topology.local_size)
            self._output.add(name, pipe)
        if process.stdin is not None:
            from choros.launch.protocol.payload import RankInput  # a command has none

            RankInput(self._loop, 0, process.stdin, lambda count: self._send(Received(count)))
        early, self._early = self._early, []
        for number in early:
            self._forward(number)
        return process

    def _may_run_again(self) -> bool:
        """Returns whether this is a worker that may be restarted: ended by a signal that chorosrun did not send."""
        if self._task is None or self._task.role != WORKER or self._restarts >= self._options.restarts:
            return False
        ended_by = -(self._status or 0)
        ended = self._received & {signal.SIGINT, signal.SIGTERM, signal.SIGKILL}
        return ended_by > 0 and ended_by not in self._received and not ended and not self._released

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
        grace = durations.ORPHANS if self._status == 0 else durations.ORPHANS_OF_FAILURE
        self._loop.run(until=lambda: not group_exists(group) or self._released, seconds=grace)
        signal_group(group, signal.SIGKILL)
        end_children(self._reap)

    def _report(self) -> Exit:
        status = self._status or 0
        return Exit(
            self._topology.rank,
            self._host,
            code=status if status >= 0 else 128 - status,
            signal=max(0, -status),
            stopped=self._stopped,
            traceback=self._output.transcript.traceback,
            shown=self._output.transcript.shown,
            tail=self._output.transcript.tail,
            seconds=round(time.monotonic() - self._began, 3),
            restarts=self._restarts,
        )

    def _send_progress(self) -> None:
        self._output.send_progress(0 if self._process is None else self._process.pid)

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
        if self._memory is not None:
            self._memory.release(segment_suffix(os.environ, self._topology.local_rank))
        session = _mpirun_session()
        if os.getppid() != self._mpirun and session is not None:  # mpirun is dead and cannot do it
            remove_owned(session)


def _become_rank(wrapper: int) -> None:
    """Sets the parent-death guard and the default signal handlers; runs in the child, before the command."""
    die_with_parent(wrapper)
    set_option(PTRACER, wrapper)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def repairs(environ: Mapping[str, str], ranks_per_host: Sequence[int]) -> dict[str, str]:
    """Returns the variables to correct: Open MPI 5 tells all ranks one host's number of ranks.
    ``ranks_per_host``: the true ones, from chorosrun, in rank order; empty if not known.

    >>> names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    >>> repairs(dict.fromkeys(names, "1"), (2, 1))["OMPI_COMM_WORLD_LOCAL_SIZE"]
    '2'
    """
    names = (OPEN_MPI.rank, OPEN_MPI.local_rank, OPEN_MPI.local_size)
    if not environ.keys() >= set(names):
        return {}
    rank, local_rank, reported = (int(environ[name]) for name in names)
    size = _size_of_host(rank, local_rank, ranks_per_host) or max(reported, local_rank + 1)
    return {} if size == reported else dict.fromkeys(_LOCAL_SIZES, str(size))


def _size_of_host(rank: int, local_rank: int, ranks_per_host: Sequence[int]) -> int | None:
    """Returns the number of ranks on ``rank``'s host; ``None`` if mpirun has assigned ranks in another way."""
    first = 0
    for count in ranks_per_host:
        if rank < first + count:
            return count if rank - first == local_rank else None
        first += count
    return None


def listening_problem(task: TFConfig | None) -> str:
    """Returns why this rank cannot listen at its address; empty if it can, or if it does not need to listen."""
    if task is None or task.role == CHIEF:
        return ""
    from choros.transport.address import listening_error  # imports sockets, which other jobs do not need

    address = task.cluster[task.role][task.index]
    error = listening_error(*split_address(address))
    if error is None:
        return ""
    return (
        f"{task.role} {task.index} cannot listen at {address}: {error.strerror or error}. If the port is in use, start "
        "the job again: it chooses other ports. If the address is not this host's, give in -H the names by which the "
        "hosts reach each other."
    )


def _job_memory(local_size: int) -> Directory | None:
    """Returns the directory for the shared memory of this host's ranks, if there is one; it notes mpirun's."""
    memory, session = shared_memory(os.environ, local_size), _mpirun_session()
    if memory is not None and session is not None and not session.name.startswith(SESSION):
        memory.note_daemon(session)  # else mpirun's directory is chorosrun's to remove
    return memory


def _mpirun_session() -> Path | None:
    """Returns the directory of mpirun, or of its daemon on this host."""
    session = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
    if not session.is_absolute():
        return None
    return session.parent if session.parent.name.startswith(SESSION) else session


def main() -> None:
    """Runs the wrapper with the options and the command in ``sys.argv``."""
    options, command = WrapperOptions.parse(sys.argv[1]), sys.argv[2:]
    os.environ.update(repairs(os.environ, options.ranks_per_host))
    if options.new_rank:
        os.environ[VARIABLES["new_rank"].name] = options.new_rank
    try:
        topology = detect(os.environ)
    except ChorosError as error:
        sys.exit(f"choros: {error}")
    os._exit(Wrapper(topology, options, command).run())
