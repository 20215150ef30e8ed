"""``choros.spark.run``, ``run_elastic`` and ``SparkBackend``: a function on ranks that Spark places."""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO, TypeVar

from choros.errors import ConfigError
from choros.launch.plan.arguments import Arguments
from choros.launch.run import arguments_in_python, pack
from choros.spark.driver import active_context, run_job, show_in
from choros.spark.plan import SparkJob

Returned = TypeVar("Returned")

#: Seconds in which Spark must have started the tasks, as in Horovod.
_START = 600.0
_START_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"


def run(
    fn: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    **own: Any,
) -> list[Returned]:
    """Runs ``fn(*args, **kwargs)`` on ``num_proc`` ranks, each in the slot of a Spark task, and returns their results.

    The tasks are one barrier stage: if an executor is lost, it is tried again, up to four times
    (``spark.stage.maxConsecutiveAttempts``), and goes on from the last commit in ``commit_dir``, which all share.

    Args:
        fn: The function; it is pickled by value (cloudpickle), and calls ``init()`` itself.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks. Default: ``spark.default.parallelism``.
        start_timeout: Seconds to start the tasks. Default: ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
        use_mpi: Communicate through MPI, which is the default.
        use_gloo: Communicate through PyTorch's Gloo instead of MPI.
        extra_mpi_args: Additional arguments for mpirun, in one text.
        env: Environment variables to set for the ranks, besides those of the executors.
        stdout: Where ranks' output is shown. Default: ``sys.stdout``.
        stderr: Where ranks' errors are shown. Default: ``sys.stderr``.
        verbose: 2 shows the mpirun command and each rank's settings.
        nics: Communicate only through these network interfaces.
        prefix_output_with_timestamp: Begin every line with the date and time.
        executable: The Python that runs the function. Default: that of Spark's workers.
        own: Further arguments of ``choros.run``: ``commit_dir``, ``commit_steps``, ``timeout``, ``report``, …

    Returns:
        The ranks' results, in the order of the ranks.

    Raises:
        ConfigError: an argument is invalid, or there is no Spark session.
        WorkerFailed: a rank failed; the error has the rank, its host and its traceback.
        LaunchError: the job could not be started, or Spark gave it up.

    Example:
        >>> import choros.spark
        >>> def train(rate):
        ...     import choros.keras as hvd; hvd.init()
        ...     return hvd.rank() * rate
        >>> choros.spark.run(train, (0.5,), num_proc=2)  # doctest: +SKIP
        [0.0, 0.5]
    """
    return _run(**locals())


def run_elastic(
    fn: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    **own: Any,
) -> list[Returned]:
    """Runs ``fn`` as ``run`` does, in an elastic job: ranks that die are replaced, and meanwhile the others go on. A
    barrier stage has all of its tasks from its start to its end; if an executor is lost, the stage is tried again with
    as many tasks as there are slots, and with ``commit_dir`` it goes on from the last commit.

    Args:
        fn: As for ``run``, and so are the arguments that are not named here.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks at the start.
        min_num_proc: Go on as long as so many ranks are left, or Spark has so many slots. Default: ``num_proc``.
        max_num_proc: Use no more slots than these when the stage is tried again. Default: ``num_proc``.
        start_timeout: As for ``run``.
        elastic_timeout: How long to wait for machines with enough slots when some were lost.
        reset_limit: How many new ranks may take the places of lost ones.
        env: As for ``run``.
        stdout: As for ``run``.
        stderr: As for ``run``.
        verbose: As for ``run``.
        nics: As for ``run``.
        prefix_output_with_timestamp: As for ``run``.
        min_np: Horovod's older name of ``min_num_proc``.
        max_np: Horovod's older name of ``max_num_proc``.
        own: Further arguments of ``choros.run``, such as ``commit_dir``.

    Returns:
        The results of the ranks that finished.
    """
    size = active_context().defaultParallelism if num_proc is None else num_proc
    least = min_num_proc if min_num_proc is not None else min_np
    most = max_num_proc if max_num_proc is not None else max_np
    own |= {"elastic_timeout": elastic_timeout, "reset_limit": reset_limit, "max_num_proc": most}
    own["min_num_proc"] = size if least is None else least
    shown: dict[str, Any] = {"verbose": verbose, "prefix_output_with_timestamp": prefix_output_with_timestamp}
    return _run(fn, args, kwargs, size, start_timeout, stdout, stderr, own, env=env, nics=nics, **shown)


class SparkBackend:
    """Runs ranks with ``choros.spark.run``, whose arguments these are, named as in Horovod."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self.num_proc, self.env, self._given = num_proc, env, kwargs

    def num_processes(self) -> int:
        """Returns the number of ranks."""
        return active_context().defaultParallelism if self.num_proc is None else self.num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **own: Any,
    ) -> list[Any]:
        """Returns what ``fn`` returns on the ranks; ``own``: further arguments of ``choros.spark.run``."""
        env = {**(self.env or {}), **(env or {})}
        return run(fn, args, kwargs, self.num_processes(), env=env, **self._given, **own)


def arguments_of(
    size: int,
    *,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    extra_mpi_args: str | None = None,
    **given: Any,
) -> tuple[Arguments, list[str]]:
    """Returns the arguments of a job that these are, and what is to be said of those without an effect."""
    given |= {"num_proc": size, "verbose": verbose > 1}
    if extra_mpi_args is not None:
        given["mpi_args"] = extra_mpi_args
    if nics is not None:
        given["network_interfaces"] = nics if isinstance(nics, str) else sorted(nics)
    if given.get("commit_dir") is not None:  # a path of all machines
        given["commit_dir"] = os.path.abspath(given["commit_dir"])
    try:
        return arguments_in_python("choros.spark", given)
    except TypeError as error:
        raise TypeError(f"choros.spark.run(): {error}") from None


def _run(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_proc: int | None,
    start_timeout: float | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
    own: Mapping[str, Any],
    executable: str | None = None,
    **given: Any,
) -> list[Any]:
    if not callable(fn):
        raise ConfigError(f"choros.spark.run({fn!r}): expected a function.")
    size = active_context().defaultParallelism if num_proc is None else num_proc
    start = start_timeout or float(os.environ.get(_START_VARIABLE) or _START)
    arguments, sentences = arguments_of(size, **given, **own)
    call = pack(partial(fn, *args, **(kwargs or {})))
    job = SparkJob(arguments, call, "", secrets.token_hex(32), start, tuple(sentences), executable)
    return run_job(job, size, partial(show_in, stdout, stderr))
