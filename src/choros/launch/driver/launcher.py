"""The launcher of a job: checks hosts, plans its command, supervises it, cleans up; again: ``restarts.py``."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from choros import durations
from choros.errors import ConfigError
from choros.frameworks import keras_backend_of_ranks
from choros.launch.driver.job_end import JobEnd
from choros.launch.driver.job_record import JobRecord, served
from choros.launch.driver.machine import with_home
from choros.launch.driver.outcome import Outcome, outcome_of
from choros.launch.driver.output import Output, shown_if_slow
from choros.launch.driver.restarts import HostWatch, launch_again
from choros.launch.driver.supervisor import Supervisor
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.command import Command, plan, rank_lines
from choros.launch.plan.cores import usable_cores
from choros.launch.plan.environment import in_allocation, in_slurm
from choros.launch.plan.hosts import hosts_of_ranks
from choros.launch.plan.job import Job, Limits
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.plan.roles import CHIEF, PS, WORKER
from choros.launch.processes.control import WHAT, control_socket
from choros.launch.processes.directories import SESSION, job_directories, remove_stale, temporary
from choros.launch.processes.pipes import frame_pipes
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.observe import events
from choros.settings import VARIABLES, Config
from choros.transport.loop import caught_signals
from choros.wording import count_text

#: More ranks than this for each core are probably a mistake.
_RANKS_PER_CORE = 4


def dry_run_command(job: Job, mpirun: Mpirun) -> Command:
    """Returns the command that would run ``job``, with the job name ``dry-run``."""
    session = str(temporary() / f"{SESSION}dry-run")
    job = assign_addresses(job, os.environ)
    return plan(job, mpirun, os.environ, name="dry-run", session=session, root=os.geteuid() == 0)


def launch(
    job: Job,
    mpirun: Mpirun,
    output: Output,
    arguments: Arguments,
    *,
    payload: bytes | None = None,
    shows_outcome: bool = False,
) -> tuple[JobEnd, Outcome]:
    """Runs ``job`` to its end, an elastic one again, as long as that can be, and writes the report that the
    ``arguments`` want. It closes ``output``, which then shows the outcome's messages, if it ``shows_outcome``.
    """
    limits, verbose = arguments.limits(os.environ), arguments.verbose
    record = JobRecord(job.command, job.size, job.environment)
    once = partial(_launch_once, mpirun=mpirun, output=output, record=record, payload=payload, verbose=verbose)
    output.listen(record.show, record.print)
    try:
        with served(record, arguments.metrics_port, output.show):
            if job.elastic is None:
                job_end = once(job, limits)
            else:
                job_end = launch_again(job, job.elastic, limits, once, output.show)
    finally:
        output.close()
    outcome = outcome_of(job_end, limits)
    for line in outcome.lines if shows_outcome else ():
        output.show(line)
    record.end(outcome.exit_code)
    if arguments.report_files is not None:
        record.write(*arguments.report_files, output.show)
    return job_end, outcome


def _launch_once(
    job: Job,
    limits: Limits,
    hosts: HostWatch | None = None,
    *,
    mpirun: Mpirun,
    output: Output,
    record: JobRecord,
    payload: bytes | None,
    verbose: bool,
) -> JobEnd:
    began = time.monotonic()
    environ = {**keras_backend_of_ranks(job.command, os.environ), **with_home(os.environ)}
    if verbose and not VARIABLES["log_level"].given(environ)[1]:
        environ[VARIABLES["log_level"].name] = "INFO"
    job = assign_addresses(job, os.environ)
    if VARIABLES["restarts"].name not in job.environment:  # else its hosts have just answered
        _check_hosts(job, limits, output)
    _warn_of_overload(job, output)
    remove_stale()
    with _merged_timelines(output), caught_signals() as signals:
        with job_directories() as (name, session), ExitStack() as listening:
            if Config.from_environ({**environ, **job.environment}).log_level == "DEBUG":
                listening.callback(events.listen(partial(_show_event, output)))
            job = replace(job, options=replace(job.options, events=events.Kind.COLLECTIVE_BEGUN in events.heard))
            command = plan(job, mpirun, environ, name=name, session=str(session), root=os.geteuid() == 0)
            if verbose:
                for line in (str(command), *rank_lines(job, environ)):
                    output.show(f"chorosrun: {line}")
                output.show(f"chorosrun: hosts checked and command planned in {time.monotonic() - began:.2f} s")
            pipes = listening.enter_context(frame_pipes(session, job.most if command.one_host else 0))
            job_end = Supervisor(
                job,
                command,
                output,
                record,
                limits,
                signals,
                mpirun.implementation.signal_map,
                frame_pipes=pipes,
                clients={what: listening.enter_context(control_socket(session, what)) for what in WHAT},
                hosts=hosts,
                payload=payload,
                verbose=verbose,
            ).run()
        for number in signals.read():  # too late for the ranks, but not to start no others
            job_end.asked = job_end.asked if number == signal.SIGUSR2 else number
        return job_end


def _show_event(output: Output, event: events.Event) -> None:
    rank = f"[{event.rank}] " if event.rank >= 0 else ""
    output.show(f"chorosrun: {rank}{event}")


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
            from choros.trace.files import merge_left_parts  # takes 10 ms; other jobs do not need it

            for file in sorted(files):
                try:
                    merge_left_parts(Path(file))
                except (OSError, ValueError) as error:
                    output.show(f"chorosrun: the timeline {file} cannot be written: {error}.")


def assign_addresses(job: Job, environ: Mapping[str, str]) -> Job:
    """Returns the job, if it has parameter servers, with addresses and a secret (by default new) in its environment, as
    ``plan/roles.py`` says; fails under a scheduler.
    """
    if not job.roles:
        return job
    import secrets  # takes 10 ms with the next one; other jobs do not need it

    from choros.transport.address import free_ports

    if not job.hosts and in_allocation(environ):
        raise ConfigError(
            "--ps needs the names of the hosts, and in a scheduler's allocation mpirun chooses them: name them with "
            "-H host:slots,..."
        )
    hosts = _hosts_of_ranks(job)
    ports = free_ports(job.size)
    names = [f"[{host}]" if ":" in host else host for host in hosts]
    chief, *others = (f"{name}:{port}" for name, port in zip(names, ports, strict=True))
    cluster = {CHIEF: [chief], PS: others[: job.servers], WORKER: others[job.servers :]}
    secret = VARIABLES["secret"].name
    shared = {CLUSTER: json.dumps(cluster), secret: environ.get(secret) or secrets.token_hex(32)}
    return replace(job, environment={**shared, **job.environment})


def _hosts_of_ranks(job: Job) -> list[str]:
    """Returns the address of each rank's host: loopback if all ranks run on one host."""
    from choros.transport.address import LOOPBACK, address_towards, outward_address

    names = hosts_of_ranks(job.hosts, job.size)
    remote = {host.name for host in job.remote}
    resolved = {name: _resolve(name) for name in dict.fromkeys(names) if name in remote}
    if len(set(names)) <= 1 or not resolved:
        return [LOOPBACK] * job.size
    try:  # the address of this host on the route to another one
        here = address_towards(next(iter(resolved.values())))
    except OSError:
        here = outward_address()
    return [resolved.get(name, here) for name in names]


def _resolve(name: str) -> str:
    """Returns the address at which other hosts reach ``name``; the name itself if only ssh can resolve it."""
    import socket

    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


def _check_hosts(job: Job, limits: Limits, output: Output) -> None:
    if not job.remote or in_slurm(os.environ):
        return
    from choros.launch.driver.preflight import check_hosts  # takes 20 ms; other jobs do not need it

    hosts = "host" if len(job.remote) == 1 else "hosts"
    message = f"chorosrun: checking {len(job.remote)} remote {hosts} …"
    with shown_if_slow(message, durations.SLOW_CHECK, output.show):
        check_hosts(job.remote, job.ssh, limits.start)


def _warn_of_overload(job: Job, output: Output) -> None:
    cores = usable_cores()
    if job.remote or in_allocation(os.environ) or job.size <= _RANKS_PER_CORE * cores:
        return
    output.show(
        f"chorosrun: {job.size} ranks share the {count_text(cores, 'core')} of this machine: more ranks than "
        "cores make training slower, not faster."
    )
