"""``choros.run``: launches a job from Python that runs a function instead of a command."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from choros.errors import ConfigError, JobTimeout, LaunchError, WorkerFailed
from choros.launch.driver.accelerators import count_accelerators
from choros.launch.driver.host_names import own_names
from choros.launch.driver.launcher import launch
from choros.launch.driver.line_merger import LineMerger
from choros.launch.driver.mpirun_detection import detect_mpirun
from choros.launch.driver.outcome import outcome_of
from choros.launch.driver.output import Files, Output, Screen
from choros.launch.driver.stopping import Reason
from choros.launch.driver.supervisor import JobEnd
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.limits import Limits
from choros.launch.protocol.payload import FunctionCall, pack
from choros.launch.protocol.wrapper_options import WrapperOptions

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
    start_timeout: float = Arguments.start_timeout,
    grace_period: float = Arguments.grace_period,
    exit_timeout: float | None = Arguments.exit_timeout,
    output_dir: str | os.PathLike[str] | None = None,
    prefix_output: bool | None = None,
    merge_output: bool | None = None,
    verbose: bool = False,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    ssh_command: str | None = None,
    network_interfaces: str = "",
    mpirun: str | None = None,
    mpi_args: str = "",
    binding_args: str = "",
    tcp: bool = False,
    num_proc: int | None = None,
) -> list[Returned]:
    """Runs ``fn(*args, **kwargs)`` on every rank of a new job and returns the ranks' results.

    Works in a script and in a notebook. The function is pickled by value (cloudpickle), so it may be defined in the
    notebook; it runs in a new process and calls ``init()`` itself.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks. Default, as chorosrun's: the number of slots of the hosts, or of a scheduler's allocation;
            without either, the number of accelerators of this machine, at least 1.
        hosts: the hosts, as ``"a:4,b:4"``. Default: this machine.
        hostfile: a file of hosts, one line ``name slots=N`` for each.
        env: environment variables to set for the ranks.
        timeout: seconds after which the job is stopped.
        start_timeout: seconds that connecting to the hosts and starting the ranks may take.
        grace_period: seconds that ranks may take to end after SIGINT or SIGTERM.
        exit_timeout: seconds that ranks may take to end after their scripts. Default: 300 while all others wait or have
            ended; no limit while all ranks take their time.
        output_dir: also write each rank's output to ``rank.N/stdout`` and ``stderr`` in this directory.
        prefix_output: prefix every line with ``[rank]``. Default: with more than one rank.
        merge_output: show equal lines that several ranks write on standard error within a moment as one line. Default:
            with a prefix, unless ``CHOROS_MERGE_OUTPUT=0``.
        verbose: show the mpirun command, each rank's settings and mpirun's messages.
        ssh_port: the port of the hosts' ssh servers.
        ssh_identity_file: the private key for ssh.
        ssh_command: a program to use instead of ssh, with its arguments.
        network_interfaces: communicate only through these, as ``"eth0,eth1"``.
        mpirun: the mpirun to use. Default: the one installed with choros.
        mpi_args: additional arguments for mpirun.
        binding_args: mpirun's arguments for binding and mapping, instead of choros' own binding to whole cores.
        tcp: communicate only through TCP, even if a faster network exists.
        num_proc: Horovod's other name for ``np``.

    Returns:
        The ranks' results, in the order of the ranks.

    Raises:
        ConfigError: an argument is invalid; nothing has been started.
        WorkerFailed: a rank failed; the error has the rank, its host and its traceback.
        JobTimeout: ``timeout`` has passed.
        HostUnreachable: a host does not exist or refuses the login.
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
    if not callable(fn):
        raise ConfigError(f"choros.run({fn!r}): expected a function. A command is run with chorosrun.")
    if None not in (np, num_proc) and np != num_proc:
        raise ConfigError(f"np={np!r} and num_proc={num_proc!r} are two names of one argument: give one of them.")
    arguments = Arguments(
        num_proc=num_proc if np is None else np,
        env=env or {},
        hosts=hosts,
        hostfile=hostfile,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        ssh_command=ssh_command,
        network_interfaces=network_interfaces,
        tcp=tcp,
        prefix_output=prefix_output,
        merge_output=merge_output,
        output_dir=output_dir,
        verbose=verbose,
        timeout=timeout,
        start_timeout=start_timeout,
        grace_period=grace_period,
        exit_timeout=exit_timeout,
        mpirun=mpirun,
        mpi_args=mpi_args,
        binding_args=binding_args,
        in_python=True,
    )
    command, options = (sys.executable, *_BOOTSTRAP), WrapperOptions(stdin=True, result=True)
    job = arguments.job(command, os.environ, own_names, count_accelerators, options)
    limits = arguments.limits
    screen = Screen(_TextSink(sys.stdout), _TextSink(sys.stderr), prefix=arguments.prefix(job.size), colour=False)
    files = Files(Path(output_dir), job.size) if output_dir is not None else None
    output = Output(screen, files, LineMerger(job.size) if arguments.merge(job.size, os.environ) else None)
    payload = pack(FunctionCall(fn, args, kwargs or {}))
    job_end = launch(job, detect_mpirun(mpirun), os.environ, output, limits, payload=payload, verbose=verbose)
    _raise_failure(job_end, limits)
    return [_result(job_end, rank) for rank in range(job.size)]


class _TextSink:
    """Decodes bytes for a text stream: a notebook's standard output accepts only text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream.write(data.decode("utf-8", "replace"))
        self._stream.flush()


def _raise_failure(job_end: JobEnd, limits: Limits) -> None:
    """Raises the error that describes the failure, if the job failed."""
    outcome = outcome_of(job_end, limits)
    if outcome.exit_code == 0:
        return
    if job_end.reason is Reason.INTERRUPT:
        raise KeyboardInterrupt
    if job_end.reason is Reason.TERMINATE:
        signal.raise_signal(signal.SIGTERM)  # caught while the ranks ended; now it applies to this process
    message = "\n".join(outcome.lines).removeprefix("chorosrun: ")
    if job_end.reason is Reason.TIMEOUT:
        waits = "".join(f" {line[:1].upper()}{line[1:]}." for line in job_end.waits)
        raise JobTimeout(f"the job ran longer than timeout={limits.run:g} s and was stopped.{waits}")
    if outcome.failure is None:
        raise LaunchError(message)
    end = outcome.failure
    raise WorkerFailed(message, rank=end.rank, host=end.host, exit_code=end.code, traceback=end.traceback or end.tail)


def _result(job_end: JobEnd, rank: int) -> Any:
    data = job_end.results.get(rank)
    if not data:
        raise LaunchError(f"rank {rank} ended before the function had returned: did it call sys.exit()?")
    return pickle.load(io.BytesIO(data))  # noqa: S301  (see payload.py)
