"""``choros.run``: chorosrun from Python, for a function instead of a command."""

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
from choros.launch.driver.mpirun_detection import detect_mpirun
from choros.launch.driver.outcome import judge
from choros.launch.driver.output import Files, Output, Screen
from choros.launch.driver.stopping import Reason
from choros.launch.driver.supervisor import Outcome
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.limits import Limits
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
    start_timeout: float = Arguments.start_timeout,
    grace_period: float = Arguments.grace_period,
    output_dir: str | os.PathLike[str] | None = None,
    prefix_output: bool | None = None,
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
    """Runs ``fn(*args, **kwargs)`` on every rank of a new job and returns what each returned.

    From a script or a notebook. The function is pickled by value (cloudpickle), so it may be defined in the
    notebook; it starts in a fresh process and calls ``init()`` itself.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by name.
        np: how many ranks. Default, as chorosrun's: the slots of the hosts; or one for each accelerator here; or 1.
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
        network_interfaces: communicate through these only, as ``"eth0,eth1"``.
        mpirun: the mpirun to use. Default: the one installed with choros.
        mpi_args: more arguments for mpirun.
        binding_args: mpirun's arguments for binding and mapping, in place of choros' own binding to whole cores.
        tcp: communicate through TCP only, whatever faster network there is.
        num_proc: Horovod's other name for ``np``.

    Returns:
        What the ranks returned, rank 0's first.

    Raises:
        ConfigError: an argument is invalid; nothing has been started.
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
        output_dir=output_dir,
        verbose=verbose,
        timeout=timeout,
        start_timeout=start_timeout,
        grace_period=grace_period,
        mpirun=mpirun,
        mpi_args=mpi_args,
        binding_args=binding_args,
        in_python=True,
    )
    command, options = (sys.executable, *_BOOTSTRAP), Options(stdin=True, result=True)
    job = arguments.job(command, os.environ, own_names, count_accelerators, options)
    limits = arguments.limits
    screen = Screen(_TextSink(sys.stdout), _TextSink(sys.stderr), prefix=arguments.prefix(job.size), colour=False)
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
