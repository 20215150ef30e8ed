"""``choros.run``: launches a job from Python that runs a function instead of a command."""

import codecs
import inspect
import io
import os
import pickle
import re
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, TextIO, TypeVar

from choros.errors import ConfigError, JobTimeout, LaunchError, WorkerFailed
from choros.frameworks import installed
from choros.launch.bootstrap import pack
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.launcher import launch
from choros.launch.driver.machine import count_accelerators, detect_mpirun, own_names, run_script
from choros.launch.driver.outcome import Outcome
from choros.launch.driver.output import output_of
from choros.launch.plan.arguments import FLAGS, Arguments
from choros.launch.plan.horovod_flags import check, unused, variables
from choros.launch.protocol.wrapper_options import WrapperOptions
from choros.observe import events
from choros.observe.events import Event, Kind
from choros.wording import count_text

Returned = TypeVar("Returned")

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
    **own: Any,
) -> list[Returned]:
    """Runs ``func(*args, **kwargs)`` on every rank of a new job and returns the ranks' results."""
    return _run(**locals())


def _signature() -> inspect.Signature:
    """Returns that of ``run``: Horovod's arguments, in Horovod's order, and those of the rows that Horovod lacks."""
    horovods = inspect.signature(run)
    *named, _ = horovods.parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(each.name, kind, default=FLAGS[each.name].default, annotation=each.type)
        for each in fields(Arguments)
        if each.metadata and each.name not in horovods.parameters and FLAGS[each.name].python is not None
    ]
    return horovods.replace(parameters=[*named, *own])


_SIGNATURE = run.__signature__ = _signature()  # type: ignore[attr-defined]


def _run(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, own: Mapping[str, Any], **given: Any
) -> list[Any]:
    """Runs ``func`` with the arguments of ``run``, by name; an error or a warning is about the caller's caller."""
    for name in own:
        if name not in _SIGNATURE.parameters:
            raise TypeError(f"choros.run() got an unexpected keyword argument {name!r}")
    given |= own
    if not callable(func):
        raise ConfigError(f"choros.run({func!r}): expected a function. A command is run with chorosrun.")
    for old, name in _DEPRECATED.items():
        value = given.pop(old)
        if value is not None:
            warnings.warn(f"{old} is deprecated, use {name} instead.", DeprecationWarning, stacklevel=3)
            given[name] = value
    output_filename, executable = given.pop("output_filename"), given.pop("executable")
    if output_filename is not None:
        if given.get("output_dir") is not None:
            raise ConfigError("output_dir and output_filename are two names of one argument: give one of them.")
        given["output_dir"] = output_filename
    arguments, sentences = arguments_in_python("choros.run", given)
    return run_call(partial(func, *args, **(kwargs or {})), arguments, sentences, executable)


def arguments_in_python(caller: str, given: Mapping[str, Any]) -> tuple[Arguments, list[str]]:
    """Returns the arguments of a job that a function is called with, of which ``None`` is not given, and what is to be
    said of those without an effect.
    """
    horovods = {name: given.get(name) or None for name in ("disable_cache", "use_gloo", "use_mpi")}
    check(horovods, lambda: "torch" in installed(), in_python=True)
    own = {name: value for name, value in given.items() if value is not None and name not in horovods}
    own["env"] = {**variables(horovods), **own.get("env", {})}
    return Arguments(in_python=True, **own), [f"{caller}: {text}" for text in unused(horovods, in_python=True)]


def run_call(
    call: Callable[[], Any], arguments: Arguments, sentences: Iterable[str] = (), executable: str | None = None
) -> list[Any]:
    """Runs ``call`` on every rank of a new job, after showing ``sentences``; see ``run``."""
    command, options = (executable or sys.executable, *_BOOTSTRAP), WrapperOptions(call=True)
    job = arguments.job(command, os.environ, own_names, count_accelerators, options, discover=run_script)
    payload, mpirun = pack(call), detect_mpirun(arguments.mpirun)
    output = output_of(job, arguments, _writer(sys.stdout), _writer(sys.stderr), colour=False)
    for sentence in sentences:
        output.show(sentence)
    with _shown_progress():
        job_end, outcome = launch(job, mpirun, output, arguments, payload=payload)
    _raise_failure(job_end, outcome, arguments.timeout)
    if job.elastic is None:
        return [_result(job_end, rank) for rank in range(job.size)]
    finished = [rank for rank, end in sorted(job_end.exits.items()) if end.code == 0]
    # New ranks that were not needed any more have not called the function.
    return [_result(job_end, rank) for rank in [each for each in finished if job_end.results.get(each)] or finished]


#: The arguments that have a new name.
_DEPRECATED = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}
#: What the arguments that are no flags of chorosrun's are for.
_ARGUMENTS = {
    "func": "The function.",
    "args": "Its positional arguments.",
    "kwargs": "Its keyword arguments.",
    "disable_cache": "Has no effect: hosts are checked at every start.",
    "output_filename": "Horovod's name of ``output_dir``.",
    "use_gloo": "Communicate through PyTorch's Gloo instead of MPI.",
    "use_mpi": "Communicate through MPI, which is the default.",
    "executable": "The Python that runs the function. Default: this one.",
    **{old: f"Deprecated: use ``{name}``." for old, name in _DEPRECATED.items()},
}
_DOCUMENTATION = """Runs ``func(*args, **kwargs)`` on every rank of a new job and returns the ranks' results.

Works in a script and in a notebook. The function is pickled by value (cloudpickle), so it may be defined in the
notebook; it runs in a new process and calls ``init()`` itself. The arguments are ``horovod.run``'s, and after these
chorosrun's.

Args:
    {arguments}

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
    >>> choros.run(add, (10,), {{"b": 100}}, num_proc=2)  # doctest: +SKIP
    [110, 111]
"""


def _documentation() -> str:
    spelled = {name: f"``{each.dest}``" for each in FLAGS.values() for name in each.on}

    def described(name: str) -> str:
        if name in _ARGUMENTS:
            return _ARGUMENTS[name]
        row = FLAGS[name]
        text = row.python or re.sub(r"--?\w[\w-]*", lambda flag: spelled.get(flag[0], flag[0]), row.help)
        return f"{text} In seconds." if row.metavar == "SECONDS" else text

    lines = [
        textwrap.fill(f"{name}: {described(name)}", 114, subsequent_indent=" " * 8) for name in _SIGNATURE.parameters
    ]
    return _DOCUMENTATION.format(arguments="\n    ".join(lines))


run.__doc__ = _documentation()


def _writer(stream: TextIO) -> Callable[[bytes], None]:
    """Returns what writes bytes to a text stream: a notebook's standard output accepts only text."""

    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two parts

    def write(data: bytes) -> None:
        stream.write(decoder.decode(data))
        stream.flush()

    return write


@contextmanager
def _shown_progress() -> Iterator[None]:
    """In a notebook, shows above the output how many ranks run, and for how long, while the block runs."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        yield
        return

    running: set[int] = set()
    began, ended = time.monotonic(), threading.Event()

    def text() -> dict[str, str]:
        number = count_text(len(running), "rank")
        what = "ended after" if ended.is_set() else f"{number} running:" if running else "starting:"
        return {"text/plain": f"choros: {what} {time.monotonic() - began:.0f} s"}

    def note(event: Event) -> None:
        (running.add if event.kind is Kind.RANK_STARTED else running.discard)(event.rank)

    def tick() -> None:
        while not ended.wait(1):
            shown.update(text(), raw=True)

    shown, clock = (
        ipython.display.display(text(), raw=True, display_id=True),
        threading.Thread(target=tick, daemon=True),
    )
    stop_listening = events.listen(note, {Kind.RANK_STARTED, Kind.RANK_ENDED})
    clock.start()
    try:
        yield
    finally:
        stop_listening()
        ended.set()
        clock.join()
        shown.update(text(), raw=True)


def _raise_failure(job_end: JobEnd, outcome: Outcome, timeout: float | None) -> None:
    if outcome.exit_code == 0:
        return
    if job_end.reason is Reason.INTERRUPT:
        raise KeyboardInterrupt
    if job_end.reason is Reason.TERMINATE:
        signal.raise_signal(signal.SIGTERM)  # caught while the ranks ended; now it applies to this process
    message = "\n".join(outcome.lines).removeprefix("chorosrun: ")
    if job_end.reason is Reason.TIMEOUT:
        waits = "".join(f" {line[:1].upper()}{line[1:]}." for line in job_end.waits)
        raise JobTimeout(f"the job ran longer than timeout={timeout:g} s and was stopped.{waits}")
    if outcome.failure is None:
        raise LaunchError(message)
    end = outcome.failure
    raise WorkerFailed(message, rank=end.rank, host=end.host, exit_code=end.code, traceback=end.traceback or end.tail)


def _result(job_end: JobEnd, rank: int) -> Any:
    data = job_end.results.get(rank)
    if not data:
        raise LaunchError(f"rank {rank} ended before the function had returned: did it call sys.exit()?")
    return pickle.load(io.BytesIO(data))  # noqa: S301  (see bootstrap.py)
