"""The launcher of a job: checks its hosts, plans its command, supervises it, and cleans up on this host.

An elastic job may be launched several times: see ``restarts.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from choros.config import LOG_LEVEL, RESTARTS, SESSION_BYTES, Config
from choros.errors import LaunchError
from choros.frameworks import keras_backend_of_ranks
from choros.launch.driver.host_watch import HostWatch
from choros.launch.driver.output import Output
from choros.launch.driver.rank_killer import RankKiller
from choros.launch.driver.supervisor import JobEnd, supervise
from choros.launch.plan.command import Command, plan
from choros.launch.plan.cores import usable_cores
from choros.launch.plan.dry_run import rank_lines
from choros.launch.plan.environment import in_allocation, in_slurm
from choros.launch.plan.job import Job
from choros.launch.plan.limits import Limits
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.processes.control import control_socket
from choros.launch.processes.directories import (
    SESSION,
    Directory,
    remove_shared_memory,
    remove_stale,
    reserve_shared_memory,
    session_directory,
    temporary,
)
from choros.launch.processes.pipes import frame_pipes
from choros.observe import events

__all__ = ["dry_run_command", "launch"]

_SILENT_SECONDS = 2.0
#: More ranks than this for each core are probably a mistake.
_RANKS_PER_CORE = 4


def dry_run_command(job: Job, mpirun: Mpirun, environ: Mapping[str, str]) -> Command:
    """Returns the command that would run ``job``, with the job name ``dry-run``."""
    session = str(temporary() / f"{SESSION}dry-run")
    return plan(_with_addresses(job, environ), mpirun, environ, name="dry-run", session=session, root=_is_root())


def launch(
    job: Job,
    mpirun: Mpirun,
    environ: Mapping[str, str],
    output: Output,
    limits: Limits,
    *,
    payload: bytes | None = None,
    verbose: bool = False,
) -> JobEnd:
    """Runs ``job`` to its end; an elastic one again, as long as that can be.

    Args:
        job: the job to run.
        mpirun: the mpirun that runs it.
        environ: the ranks' environment, to which the job adds its own variables.
        output: receives the ranks' output, and is closed.
        limits: the time limits.
        payload: bytes for rank 0's standard input.
        verbose: show the command, each rank's settings and mpirun's messages; ranks log the engine they choose.

    Raises:
        HostUnreachable: a host does not exist or refuses the login.
        LaunchError: the job's directory cannot be created.
        ConfigError: an environment variable that ranks read has an invalid value.
    """

    def once(job: Job, limits: Limits, hosts: HostWatch | None = None) -> JobEnd:
        return _launch_once(job, mpirun, environ, output, limits, hosts, payload, verbose)

    try:
        if job.elastic is None:
            return once(job, limits)
        from choros.launch.driver.restarts import launch_again  # other jobs do not need it

        return launch_again(job, environ, limits, once, output.show)
    finally:
        output.close()


def _launch_once(
    job: Job,
    mpirun: Mpirun,
    environ: Mapping[str, str],
    output: Output,
    limits: Limits,
    hosts: HostWatch | None,
    payload: bytes | None,
    verbose: bool,
) -> JobEnd:
    """Runs ``job`` once; see ``launch``."""
    began = time.monotonic()
    if verbose and not LOG_LEVEL.given(environ)[1]:
        environ = {**environ, LOG_LEVEL.name: "INFO"}
    environ = {**keras_backend_of_ranks(job.command, environ), **environ}
    shows_events = Config.from_environ({**environ, **job.environment}).log_level == "DEBUG"
    job = _with_addresses(job, environ)
    if RESTARTS.name not in job.environment:  # else its hosts have just answered
        _check_hosts(job, environ, limits, output)
    _warn_of_overload(job, environ, output)
    remove_stale()
    name = os.urandom(6).hex()
    memory = reserve_shared_memory(name)
    session = session_directory(name)
    if session is None:
        _release(name, memory)
        raise LaunchError(
            f"the job needs a directory in {temporary()}, which is read-only or has less than {SESSION_BYTES >> 20} "
            "MiB left. Set TMPDIR to another one."
        )
    stop_listening = _show_events(output) if shows_events else None
    job = replace(job, options=replace(job.options, events=events.active()))
    try:
        command = plan(job, mpirun, environ, name=name, session=str(session.path), root=_is_root())
        if verbose:
            output.show(f"chorosrun: {command}")
            for line in rank_lines(job, environ):
                output.show(f"chorosrun: {line}")
            output.show(f"chorosrun: hosts checked and command planned in {time.monotonic() - began:.2f} s")
        with (
            _merged_timelines(output),
            frame_pipes(session.path, job.most if command.one_host else 0) as pipes,
            control_socket(session.path) as control,
        ):
            return supervise(
                command,
                job.size,
                output,
                roles=job.roles,
                elastic=job.elastic,
                killer=RankKiller([host.name for host in job.remote], job.ssh),
                signal_map=mpirun.implementation.signal_map,
                limits=limits,
                frame_pipes=pipes,
                control=control,
                hosts=hosts,
                payload=payload,
                verbose=verbose,
            )
    finally:
        if stop_listening is not None:
            stop_listening()
        session.remove()
        _release(name, memory)


def _release(name: str, memory: Sequence[Directory]) -> None:
    remove_shared_memory(name)
    for directory in memory:
        directory.unlock()


def _show_events(output: Output) -> Callable[[], None]:
    """Shows all events from now on; returns a function that ends it."""

    def show(event: events.Event) -> None:
        rank = f"[{event.rank}] " if event.rank >= 0 else ""
        output.show(f"chorosrun: {rank}{event}")

    return events.listen(show)


@contextmanager
def _merged_timelines(output: Output) -> Iterator[None]:
    """After the block, merges what ranks have recorded and, because they were ended, could not merge themselves."""
    files: set[str] = set()
    stop_listening = events.listen(lambda event: files.add(event.name), {events.Kind.RECORDING})
    try:
        yield
    finally:
        stop_listening()
        if files:
            from choros.observe.timeline.files import merge_left_parts  # takes 10 ms; other jobs do not need it

            for file in sorted(files):
                try:
                    merge_left_parts(Path(file))
                except OSError as error:
                    output.show(f"chorosrun: the timeline {file} cannot be written: {error}.")


def _with_addresses(job: Job, environ: Mapping[str, str]) -> Job:
    """Returns the job, with its cluster's addresses if it has parameter servers."""
    if not job.roles:
        return job
    from choros.launch.driver.cluster_addresses import assign_addresses  # takes 20 ms; other jobs do not need it

    return assign_addresses(job, environ)


def _check_hosts(job: Job, environ: Mapping[str, str], limits: Limits, output: Output) -> None:
    """Raises if one of the job's remote hosts cannot be reached through ssh, unless mpirun does without it."""
    if not job.remote or in_slurm(environ):
        return
    from choros.launch.driver.preflight import check_hosts  # takes 20 ms; other jobs do not need it

    hosts = "host" if len(job.remote) == 1 else "hosts"
    message = f"chorosrun: checking {len(job.remote)} remote {hosts} …"
    with _shown_after(_SILENT_SECONDS, lambda: output.show(message)):
        check_hosts(job.remote, job.ssh, limits.start)


def _warn_of_overload(job: Job, environ: Mapping[str, str], output: Output) -> None:
    """Says so if this machine has far fewer cores than ranks, which is allowed, but slow."""
    cores = usable_cores()
    if job.remote or in_allocation(environ) or job.size <= _RANKS_PER_CORE * cores:
        return
    output.show(
        f"chorosrun: {job.size} ranks share the {cores} core{'s' * (cores > 1)} of this machine: more ranks than "
        "cores make training slower, not faster."
    )


@contextmanager
def _shown_after(seconds: float, show: Callable[[], None]) -> Iterator[None]:
    """Calls ``show`` if the block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_root() -> bool:
    return os.geteuid() == 0
