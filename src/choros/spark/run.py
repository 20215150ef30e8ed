"""``choros.spark.run``, ``run_elastic``, ``SparkBackend``, and ``Distributor``, in the shape of pyspark's
``TorchDistributor``: a function on ranks that Spark places.
"""

import os
import runpy
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO, TypeVar, final

from choros.errors import ConfigError
from choros.launch.bootstrap import pack
from choros.launch.plan.arguments import Arguments
from choros.launch.run import arguments_in_python
from choros.launch.run import run as run_here
from choros.spark.driver import active_context, run_job, show_in
from choros.spark.plan import VISIBLE, SparkJob

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


@final
class Distributor:
    """Runs a function or a file on ``num_processes`` ranks, as pyspark's ``TorchDistributor`` does, on any framework.

    Args:
        num_processes: Number of ranks.
        local_mode: Whether they run on the driver's machine, as processes of its own; else in Spark's executors.
        use_gpu: Whether the ranks may use GPUs; else they see none.
        arguments: Further arguments of ``choros.spark.run``, or with ``local_mode`` of ``choros.run``.

    Example:
        >>> import choros.spark
        >>> distributor = choros.spark.Distributor(num_processes=4, local_mode=False, use_gpu=False)
        >>> distributor.run("train.py", "--epochs", "3")  # doctest: +SKIP
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True, **arguments: Any) -> None:
        if num_processes < 1:
            raise ConfigError(f"num_processes={num_processes}: expected 1 or more.")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self._arguments = arguments

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``train_object(*args, **kwargs)`` on each rank, and returns what rank 0 returns; or the Python file of
        this name, which each machine must have, with ``args`` as its arguments, and returns ``None``.
        """
        function: Callable[..., Any] = run_file if isinstance(train_object, str) else train_object
        given = (train_object, *map(str, args)) if isinstance(train_object, str) else args
        own = dict(self._arguments)
        if not self.use_gpu:
            own["env"] = {**own.get("env", {}), VISIBLE: ""}
        start = run_here if self.local_mode else run
        results: list[Any] = start(function, given, kwargs, num_proc=self.num_processes, **own)
        return results[0]


def run_file(file: str, *args: str) -> None:
    """Runs a Python file as the main program with these arguments; an exit with 0 is its end."""
    sys.argv[:] = [file, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
