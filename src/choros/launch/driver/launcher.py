"""Runs a job: checks its hosts, plans its command, supervises it, and leaves nothing behind on this host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from choros.config import LOG_LEVEL
from choros.errors import LaunchError
from choros.launch.driver.output import Output
from choros.launch.driver.supervisor import Outcome, supervise
from choros.launch.plan.command import Command, plan
from choros.launch.plan.dry_run import preparation
from choros.launch.plan.job import Job
from choros.launch.plan.limits import Limits
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.processes.directories import SESSION, remove_stale, session_directory, shared_memory, temporary
from choros.launch.protocol.wrapper_options import JOB
from choros.observe import events

__all__ = ["draft", "launch"]

_PATIENCE = 2.0


def draft(job: Job, mpirun: Mpirun, environ: Mapping[str, str]) -> Command:
    """The command that would run ``job``: that of a job called ``draft``."""
    session = str(temporary() / f"{SESSION}draft")
    return plan(_with_addresses(job, environ), mpirun, environ, name="draft", session=session, root=_is_root())


def launch(
    job: Job,
    mpirun: Mpirun,
    environ: Mapping[str, str],
    output: Output,
    limits: Limits,
    *,
    payload: bytes | None = None,
    verbose: bool = False,
) -> Outcome:
    """Runs ``job`` to its end.

    Args:
        job: what to run.
        mpirun: what to run it with.
        environ: the environment of the ranks, but for what the job sets.
        output: where the ranks' output goes.
        limits: how long things may take.
        payload: bytes for rank 0's standard input.
        verbose: show what mpirun says, and what is started; ranks say which engine they take.

    Raises:
        HostUnreachable: a host does not exist or does not let us in.
    """
    began = time.monotonic()
    job = _with_addresses(job, environ)
    _check_hosts(job, limits, output)
    remove_stale()
    name = os.urandom(6).hex()
    session = session_directory(name)
    if session is None:
        raise LaunchError(f"no directory can be made in {temporary()}: is it full, or read-only?")
    memory = shared_memory({JOB: name})
    if verbose:
        environ = {LOG_LEVEL.name: "INFO", **environ}
    stop_listening = _listen({**environ, **job.environment}, output)
    job = replace(job, options=replace(job.options, events=events.active()))
    try:
        command = plan(job, mpirun, environ, name=name, session=str(session.path), root=_is_root())
        if verbose:
            output.screen.say(f"chorosrun: {command}")
            for line in preparation(job, environ):
                output.screen.say(f"chorosrun: {line}")
            output.screen.say(f"chorosrun: hosts checked and command planned in {time.monotonic() - began:.2f} s")
        return supervise(
            command,
            job.size,
            output,
            roles=job.roles,
            carriers=mpirun.flavour.carriers,
            limits=limits,
            payload=payload,
            verbose=verbose,
        )
    finally:
        stop_listening()
        for directory in (session, memory):
            if directory is not None:
                directory.remove()


def _listen(environ: Mapping[str, str], output: Output) -> Callable[[], None]:
    """Starts chorosrun's own listeners; returns what ends them."""
    if LOG_LEVEL.read(environ) != "DEBUG":
        return lambda: None

    def show(event: events.Event) -> None:
        rank = f"[{event.rank}] " if event.rank >= 0 else ""
        output.screen.say(f"chorosrun: {rank}{event}")

    return events.listen(show)


def _with_addresses(job: Job, environ: Mapping[str, str]) -> Job:
    """The job; if it has parameter servers, with their addresses."""
    if not job.roles:
        return job
    from choros.launch.driver.cluster_addresses import assign_addresses  # 20 ms, which no other job need spend

    return assign_addresses(job, environ)


def _check_hosts(job: Job, limits: Limits, output: Output) -> None:
    """Raises if one of the job's other hosts cannot be reached."""
    if not job.remote:
        return
    from choros.launch.driver.preflight import check_hosts  # 20 ms, which no other job need spend

    hosts = "host" if len(job.remote) == 1 else "hosts"
    with _said_after(_PATIENCE, lambda: output.screen.say(f"chorosrun: checking {len(job.remote)} other {hosts} …")):
        check_hosts(job.remote, job.ssh, limits.start)


@contextmanager
def _said_after(seconds: float, say: Callable[[], None]) -> Iterator[None]:
    """Calls ``say`` if what is done meanwhile takes longer than ``seconds``."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_root() -> bool:
    return os.geteuid() == 0
