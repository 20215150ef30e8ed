"""``choros.run``: launches a job from Python that runs a function instead of a command."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from choros.errors import ConfigError, JobTimeout, LaunchError, WorkerFailed
from choros.frameworks import installed
from choros.launch.driver.accelerators import count_accelerators
from choros.launch.driver.discovery import run_script
from choros.launch.driver.host_names import own_names
from choros.launch.driver.launcher import launch
from choros.launch.driver.line_merger import LineMerger
from choros.launch.driver.mpirun_detection import detect_mpirun
from choros.launch.driver.outcome import outcome_of
from choros.launch.driver.output import Files, Output, Screen
from choros.launch.driver.stopping import Reason
from choros.launch.driver.supervisor import JobEnd
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.horovod_flags import check, unused, variables
from choros.launch.plan.limits import Limits
from choros.launch.protocol.payload import FunctionCall, pack
from choros.launch.protocol.wrapper_options import WrapperOptions

__all__ = ["run"]

Returned = TypeVar("Returned")
Given = TypeVar("Given")

_BOOTSTRAP = ("-P", "-m", "choros.launch.bootstrap")


def run(
    func: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace_period: float = Arguments.grace_period,
    exit_timeout: float | None = Arguments.exit_timeout,
    output_dir: str | os.PathLike[str] | None = None,
    prefix_output: bool | None = None,
    merge_output: bool | None = None,
    prefix_output_with_timestamp: bool = False,
    ssh_command: str | None = None,
    mpirun: str | None = None,
    binding_args: str = "",
    tcp: bool = False,
    elastic_timeout: float | None = None,
    commit_dir: str | os.PathLike[str] | None = None,
    commit_steps: int | None = None,
    chaos: str | None = None,
) -> list[Returned]:
    """Runs ``func(*args, **kwargs)`` on every rank of a new job and returns the ranks' results.

    Works in a script and in a notebook. The function is pickled by value (cloudpickle), so it may be defined in the
    notebook; it runs in a new process and calls ``init()`` itself. The arguments are ``horovod.run``'s, and after these
    chorosrun's.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks. ``None``, as chorosrun without ``-np``: the number of slots of the hosts, or of a
            scheduler's allocation; without either, the number of accelerators of this machine, at least 1.
        min_num_proc: go on without ranks that die, as long as so many are left. Default: ``num_proc``, which makes a
            job elastic that ``max_num_proc`` or ``host_discovery_script`` is given for.
        max_num_proc: have no more ranks: new ones replace those that die. Default: ``num_proc``.
        slots: the slots of a discovered host whose line has no number. Default: 1.
        reset_limit: how many times the job may be started again because mpirun, a host or a link was lost.
        cooldown_range: for how many seconds a host that was lost three times is left out, at least and at most.
            Default: for the rest of the job.
        hosts: the hosts, as ``"a:4,b:4"``. Default: this machine.
        hostfile: a file of hosts, one line ``name slots=N`` for each.
        host_discovery_script: a program that prints the hosts, one line ``host:slots`` for each; run at
            each start of the job, and with ``commit_dir`` each second.
        start_timeout: seconds that connecting to the hosts and starting the ranks may take. Default:
            ``CHOROS_START_TIMEOUT``, or 30.
        ssh_port: the port of the hosts' ssh servers.
        ssh_identity_file: the private key for ssh.
        disable_cache: has no effect: hosts are checked at every start.
        output_filename: Horovod's name of ``output_dir``.
        verbose: show the mpirun command, each rank's settings and mpirun's messages.
        use_gloo: communicate through PyTorch's Gloo instead of MPI.
        use_mpi: communicate through MPI, which is the default.
        mpi_args: additional arguments for mpirun.
        network_interface: deprecated: use ``network_interfaces``.
        network_interfaces: communicate only through these, as ``["eth0", "eth1"]`` or ``"eth0,eth1"``.
        executable: the Python that runs the function. Default: this one.
        np: deprecated: use ``num_proc``.
        min_np: deprecated: use ``min_num_proc``.
        max_np: deprecated: use ``max_num_proc``.
        env: environment variables to set for the ranks; chorosrun's flags such as ``--timeline-filename`` set some.
        timeout: seconds after which the job is stopped.
        grace_period: seconds that ranks may take to end after SIGINT or SIGTERM.
        exit_timeout: seconds that ranks may take to end after their scripts. Default: 300 while all others wait or have
            ended; no limit while all ranks take their time.
        output_dir: also write each rank's output to ``rank.N/stdout`` and ``stderr`` in this directory.
        prefix_output: prefix every line with ``[rank]``. Default: with more than one rank.
        merge_output: show equal lines that several ranks write on standard error within a moment as one line. Default:
            with a prefix, unless ``CHOROS_MERGE_OUTPUT=0``.
        prefix_output_with_timestamp: begin every line with the date and time.
        ssh_command: a program to use instead of ssh, with its arguments.
        mpirun: the mpirun to use. Default: the one installed with choros.
        binding_args: mpirun's arguments for binding and mapping, instead of choros' own binding to whole cores.
        tcp: communicate only through TCP, even if a faster network exists.
        elastic_timeout: seconds to wait for hosts with enough slots when some were lost. Default: 600.
        commit_dir: the directory of the job's commits, on a file system that all hosts share.
        commit_steps: after how many steps ``fit`` commits, in the middle of an epoch too. Default: it does not.
        chaos: faults to inject, such as ``"kill:rank=1@step=17"``.

    Returns:
        The ranks' results, in the order of the ranks; of an elastic job, of those that finished.

    Raises:
        ConfigError: an argument is invalid; nothing has been started.
        WorkerFailed: a rank failed; the error has the rank, its host and its traceback.
        JobTimeout: ``timeout`` has passed.
        HostUnreachable: a host does not exist or refuses the login.
        LaunchError: the job could not be started. Like the three above, it is a ``RuntimeError``.

    Example:
        >>> import choros
        >>> def add(a, b):
        ...     import choros
        ...     choros.init()
        ...     return choros.rank() + a + b
        >>> choros.run(add, (10,), {"b": 100}, num_proc=2)  # doctest: +SKIP
        [110, 111]
    """
    if not callable(func):
        raise ConfigError(f"choros.run({func!r}): expected a function. A command is run with chorosrun.")
    num_proc = _replaced("np", np, "num_proc", num_proc)
    given = {
        "disable_cache": disable_cache or None,
        "use_gloo": use_gloo or None,
        "use_mpi": use_mpi or None,
    }
    check(given, lambda: "torch" in installed(), in_python=True)
    if None not in (output_dir, output_filename):
        raise ConfigError("output_dir and output_filename are two names of one argument: give one of them.")
    output_dir = output_filename if output_dir is None else output_dir
    arguments = Arguments(
        num_proc=num_proc,
        min_num_proc=_replaced("min_np", min_np, "min_num_proc", min_num_proc),
        max_num_proc=_replaced("max_np", max_np, "max_num_proc", max_num_proc),
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        host_discovery_script=host_discovery_script,
        elastic_timeout=elastic_timeout,
        commit_dir=commit_dir,
        commit_steps=commit_steps,
        chaos=chaos,
        env={**variables(given), **(env or {})},
        hosts=hosts,
        hostfile=hostfile,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        ssh_command=ssh_command,
        network_interfaces=_replaced("network_interface", network_interface, "network_interfaces", network_interfaces)
        or (),
        tcp=tcp,
        prefix_output=prefix_output,
        merge_output=merge_output,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        output_dir=output_dir,
        verbose=bool(verbose),
        timeout=timeout,
        start_timeout=start_timeout,
        grace_period=grace_period,
        exit_timeout=exit_timeout,
        mpirun=mpirun,
        mpi_args=mpi_args or "",
        binding_args=binding_args,
        in_python=True,
    )
    command, options = (executable or sys.executable, *_BOOTSTRAP), WrapperOptions(stdin=True, result=True)
    job = arguments.job(command, os.environ, own_names, count_accelerators, options, discover=run_script)
    limits = arguments.limits(os.environ)
    screen = Screen(
        _TextSink(sys.stdout),
        _TextSink(sys.stderr),
        prefix=arguments.prefix(job.most),
        colour=False,
        timestamp=prefix_output_with_timestamp,
    )
    for sentence in unused(given, in_python=True):
        screen.show(f"choros.run: {sentence}")
    files = Files(Path(output_dir), job.most) if output_dir is not None else None
    output = Output(screen, files, LineMerger(job.most) if arguments.merge(job.most, os.environ) else None)
    payload = pack(FunctionCall(func, args, kwargs or {}))
    job_end = launch(job, detect_mpirun(mpirun), os.environ, output, limits, payload=payload, verbose=bool(verbose))
    _raise_failure(job_end, limits)
    finished = [rank for rank, end in sorted(job_end.exits.items()) if end.code == 0]
    return [_result(job_end, rank) for rank in (range(job.size) if job.elastic is None else finished)]


def _replaced(deprecated: str, old: Given | None, name: str, new: Given | None) -> Given | None:
    """Returns an argument that has a new name: its value under the ``deprecated`` one, if that is given."""
    if old is None:
        return new
    warnings.warn(f"{deprecated} is deprecated, use {name} instead.", DeprecationWarning, stacklevel=3)
    return old


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
