"""``choros.run``: chorosrun from Python, for a function instead of a command."""

from __future__ import annotations

import io
import os
import pickle
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from choros.errors import ConfigError, JobTimeout, LaunchError, WorkerFailed
from choros.launch.driver.launcher import launch
from choros.launch.driver.outcome import judge
from choros.launch.driver.output import Files, Output, Screen
from choros.launch.driver.stopping import Reason
from choros.launch.driver.supervisor import Limits, Outcome
from choros.launch.plan.hosts import own_names, parse_hostfile, parse_hosts, total_slots
from choros.launch.plan.job import Job, Ssh
from choros.launch.plan.mpi_implementations import detect_mpirun
from choros.launch.protocol.payload import Call, pack
from choros.launch.protocol.wrapper_options import Options

__all__ = ["run"]

Returned = TypeVar("Returned")

_BOOTSTRAP = ("-P", "-m", "choros.launch.bootstrap")


def run(
    fn: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    hostfile: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    start_timeout: float = 30.0,
    grace_period: float = 20.0,
    output_dir: str | os.PathLike[str] | None = None,
    prefix_output: bool | None = None,
    verbose: bool = False,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    ssh_command: str | None = None,
    network_interfaces: str = "",
    mpirun: str | None = None,
    mpi_args: str = "",
    num_proc: int | None = None,
) -> list[Returned]:
    """Runs ``fn(*args, **kwargs)`` on every rank of a new job and returns what each returned.

    From a script or a notebook. The function is pickled by value (cloudpickle), so it may be defined in the
    notebook; it starts in a fresh process and calls ``init()`` itself.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by name.
        np: how many ranks. Default: the slots of ``hosts``, or 2.
        hosts: where, as ``"a:4,b:4"``. Default: here.
        hostfile: the hosts, in a file with a line ``name slots=N`` each.
        env: environment variables to set for the ranks.
        timeout: seconds after which the job is ended.
        start_timeout: seconds that reaching hosts and starting ranks may take.
        grace_period: seconds that ranks may take to end when they are asked to.
        output_dir: also write what each rank prints to ``rank.N/stdout`` and ``stderr`` there.
        prefix_output: put ``[rank]`` in front of every line. Default: if there is more than one rank.
        verbose: show what is started, and what mpirun says.
        ssh_port: the port of the hosts' ssh servers.
        ssh_identity_file: the private key to show them.
        ssh_command: what to call in ssh's place.
        network_interfaces: talk through these only, as ``"eth0,eth1"``.
        mpirun: the mpirun to use. Default: the one installed with choros.
        mpi_args: more arguments for mpirun.
        num_proc: Horovod's name for ``np``.

    Returns:
        What the ranks returned, rank 0's first.

    Raises:
        WorkerFailed: a rank failed; it carries the rank, its host and its traceback.
        JobTimeout: ``timeout`` has passed.
        HostUnreachable: a host does not exist or does not let us in.
        LaunchError: the job could not be started.

    Example:
        >>> import choros
        >>> def add(a, b):
        ...     import choros
        ...     choros.init()
        ...     return choros.rank() + a + b
        >>> choros.run(add, (10,), {"b": 100}, np=2)  # doctest: +SKIP
        [110, 111]
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError("choros.run: hosts and hostfile both name hosts; give one of them.")
    places = parse_hosts(hosts) if hosts is not None else parse_hostfile(Path(hostfile)) if hostfile else ()
    names = own_names()
    job = Job(
        command=(sys.executable, *_BOOTSTRAP),
        size=np or num_proc or total_slots(places) or 2,
        hosts=places,
        remote=tuple(host for host in places if host.name not in names),
        environment=dict(env or {}),
        ssh=Ssh(ssh_port, ssh_identity_file, ssh_command),
        network_interfaces=tuple(part.strip() for part in network_interfaces.split(",") if part.strip()),
        mpi_args=tuple(shlex.split(mpi_args)),
        options=Options(stdin=True, result=True),
    )
    limits = Limits(start_timeout, timeout, grace_period)
    screen = Screen(
        _TextSink(sys.stdout),
        _TextSink(sys.stderr),
        prefix=job.size > 1 if prefix_output is None else prefix_output,
        colour=False,
    )
    output = Output(screen, Files(Path(output_dir)) if output_dir is not None else None)
    payload = pack(Call(fn, args, kwargs or {}))
    outcome = launch(job, detect_mpirun(mpirun), os.environ, output, limits, payload=payload, verbose=verbose)
    _raise_failure(outcome, limits)
    return [_result(outcome, rank) for rank in range(job.size)]


class _TextSink:
    """Bytes for a text stream: a notebook's standard output takes nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream.write(data.decode("utf-8", "replace"))

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _raise_failure(outcome: Outcome, limits: Limits) -> None:
    """Raises the error that says how the job failed, if it did."""
    verdict = judge(outcome, limits)
    if verdict.exit_code == 0:
        return
    if outcome.reason is Reason.INTERRUPT:
        raise KeyboardInterrupt
    if outcome.reason is Reason.TERMINATE:
        signal.raise_signal(signal.SIGTERM)  # we have caught it for the ranks; now it is this process' turn
    message = "\n".join(verdict.lines).removeprefix("chorosrun: ")
    if outcome.reason is Reason.TIMEOUT:
        raise JobTimeout(f"the job ran longer than timeout={limits.run:g} s and was stopped.")
    if verdict.failure is None:
        raise LaunchError(message)
    end = verdict.failure
    raise WorkerFailed(message, rank=end.rank, host=end.host, exit_code=end.code, traceback=end.traceback or end.tail)


def _result(outcome: Outcome, rank: int) -> Any:
    data = outcome.results.get(rank)
    if not data:
        raise LaunchError(f"rank {rank} ended before the function had returned: did it call sys.exit()?")
    return pickle.load(io.BytesIO(data))  # noqa: S301  (see payload.py)
