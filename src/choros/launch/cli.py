"""The commands ``chorosrun`` and ``choros stacks``: parse arguments and print; other modules do the work."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from choros import durations
from choros.errors import ChorosError, ConfigError, LaunchError
from choros.frameworks import installed, runs_here
from choros.launch.driver.launcher import dry_run_command, launch
from choros.launch.driver.machine import count_accelerators, detect_mpirun, full_name, own_names, run_script, version_of
from choros.launch.driver.output import output_of, use_colour, write_screen
from choros.launch.options import OF_HOROVODRUN, PARAMETERS, GroupedCommand
from choros.launch.plan.arguments import FLAGS, Arguments
from choros.launch.plan.command import dry_run_text
from choros.launch.plan.environment import in_slurm, parse_variables
from choros.launch.plan.horovod_flags import check, read_config_file, unused, variables, with_config
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.processes.control import STACKS_OF, answer_of
from choros.launch.protocol.wrapper_options import JOB
from choros.settings import VARIABLES
from choros.topology.clusters import ClusterHost, find_cluster


@click.command(
    cls=GroupedCommand,
    params=PARAMETERS,
    context_settings={"allow_interspersed_args": False, "max_content_width": 110},
)
def chorosrun(command: tuple[str, ...], **given: Any) -> int:
    """Runs COMMAND as several processes that train one model together."""
    if given["check_build"]:
        from choros.doctor.cli import examine  # takes 30 ms; jobs do not need it

        return examine(arguments_of(given))
    if given["version"]:
        found: Mpirun | str
        try:
            found = detect_mpirun(given["mpirun"])
        except ChorosError as error:
            found = str(error)
        click.echo(version_text(found))
        return 0
    if not command:
        raise click.UsageError("no command given. Example: chorosrun -np 2 python train.py")
    arguments, sentences = read_flags(given, lambda: "torch" in installed() or not runs_here(command, os.environ))
    for sentence in sentences:
        _say(sentence)
    if given["dry_run"]:
        mpirun = detect_mpirun(arguments.mpirun)
        job = arguments.job(command, os.environ, own_names, count_accelerators, discover=run_script)
        click.echo(dry_run_text(job, dry_run_command(job, mpirun), os.environ))
        return 0
    if arguments.names_hosts or in_slurm(os.environ) or JOB in os.environ:  # a rank may start a job of its own
        return _launch(command, arguments)
    cluster = find_cluster(os.environ, full_name)
    return _launch(command, arguments) if cluster is None else _launch_in(cluster, command, arguments)


def _launch(command: tuple[str, ...], arguments: Arguments) -> int:
    mpirun = detect_mpirun(arguments.mpirun)
    job = arguments.job(command, os.environ, own_names, count_accelerators, discover=run_script)
    if Path(command[0]).name.startswith("python") and command[1:2] in ((), ("-",)):
        raise ConfigError(
            f"{' '.join(command)} would run nothing: the standard input of ranks is empty. Write it to a file: "
            "chorosrun … python train.py"
        )
    if not job.remote:
        problem = missing_command(command[0])
        if problem is not None:
            _say(problem)
            return 126 if Path(command[0]).exists() else 127
    with _writing(arguments) as write:
        colour = use_colour(os.environ, os.isatty(1) and os.isatty(2))
        output = output_of(job, arguments, partial(write, 1), partial(write, 2), colour=colour)
        _, outcome = launch(job, mpirun, output, arguments, shows_outcome=True)
    return outcome.exit_code


@contextmanager
def _writing(arguments: Arguments) -> Iterator[Callable[[int, bytes], None]]:
    """A context with what writes to descriptors 1 and 2: beside the live view, if it is wanted and there can be one."""
    if not arguments.view:
        yield write_screen
        return
    from choros.launch.driver.live_view import LiveView, view_problem  # takes 5 ms

    problem = view_problem(os.environ)
    if problem is None:
        with closing(LiveView()) as view:
            yield view.write
        return
    if problem:
        _say(f"{problem}; output is shown as lines.")
    yield write_screen


def _launch_in(cluster: ClusterHost, command: tuple[str, ...], arguments: Arguments) -> int:
    """Runs the job, or this host's part of it, where a cluster has started this command on each host."""
    from choros.launch.agents.agent import serve_host  # takes 20 ms; other jobs do not need it
    from choros.launch.agents.hub import Hub, with_slots

    # In a container this is process 1, for which SIGTERM has no default action.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cluster, seconds = with_slots(cluster, arguments, count_accelerators), arguments.start_timeout or durations.AGENTS
    if cluster.index:
        return serve_host(cluster, seconds)
    hub, code = Hub(cluster), 128 + signal.SIGTERM
    try:
        code = _launch(command, hub.gather(arguments, seconds))
    except ChorosError as error:
        code = error.exit_code
        raise
    finally:
        hub.close(code)
    return code


@click.command(context_settings={"max_content_width": 110})
@click.argument("job", type=int, required=False)
def stacks(job: int | None) -> None:
    """Prints what every rank of a running job does: its process, whether it waits, and the stacks of its threads.

    JOB is the PID of its chorosrun on this host, or of the Python process that called choros.run; it can be left out if
    only one job of yours runs here. The ranks are not interrupted.
    """
    click.echo(answer_of(STACKS_OF, job, "choros stacks", durations.STACKS_COMMAND), nl=False)


def read_flags(given: Mapping[str, Any], has_torch: Callable[[], bool]) -> tuple[Arguments, list[str]]:
    """Returns the arguments that the options in ``given``, and the file that they name, set, and sentences about those
    without an effect; a ``ConfigError`` for wrong ones.
    """
    if given["config_file"] is not None:
        given = with_config(given, read_config_file(Path(given["config_file"])))
    check(given, has_torch)
    return arguments_of(given), unused(given)


def arguments_of(given: Mapping[str, Any]) -> Arguments:
    """Returns the arguments that the options in ``given`` set."""
    values = {name: given[name] for name in FLAGS}
    flagged = variables(given)
    env = {**flagged, **parse_variables(given["env"], os.environ)}
    verbose = given["verbose"] or flagged.get(VARIABLES["log_level"].name) == "DEBUG"
    return Arguments(**{**values, "env": env, "verbose": verbose})


def unabbreviated(name: str) -> str:
    """Returns the one flag of horovodrun, without dashes, that ``name`` begins; else, or if it is a flag, ``name``.

    >>> unabbreviated("verb"), unabbreviated("no-stall"), unabbreviated("host"), unabbreviated("ps")
    ('verbose', 'no-stall-check', 'host', 'ps')
    """
    own = {flag.lstrip("-") for each in chorosrun.params for flag in (*each.opts, *each.secondary_opts)}
    names = (flag for each in OF_HOROVODRUN for flag in (*each.on, *each.off) if flag not in each.own_names.split())
    meant = [flag[2:] for flag in names if flag.startswith(f"--{name}")]
    return meant[0] if len(meant) == 1 and name not in own else name


def missing_command(program: str) -> str | None:
    """Returns why ``program`` cannot be run on this host; ``None`` if it can."""
    if shutil.which(program) is not None:
        return None
    path = Path(program)
    if path.suffix == ".py" and path.is_file():
        return f"{program!r} is not executable. A Python script is run with: chorosrun … python {program}"
    return f"command not found: {program!r}." if not path.exists() else f"{program!r} is not executable."


def version_text(mpirun: Mpirun | str) -> str:
    """Returns the versions of choros, mpirun and mpi4py; ``mpirun`` is an error message if none was found."""
    mpi = mpirun if isinstance(mpirun, str) else f"{mpirun.version} ({mpirun.path})"
    python = ".".join(map(str, sys.version_info[:3]))
    choros = f"choros {version_of('choros')}".rstrip()
    return f"{choros}\nmpi4py {version_of('mpi4py')}\nmpirun: {mpi}\nPython {python}"


def main(arguments: Sequence[str] | None = None, *, abbreviations: bool = False) -> NoReturn:
    """Runs ``chorosrun`` and exits; ``abbreviations``: its flags may be abbreviated, as in horovodrun."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in ``chorosrun … &`` in a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        normalize = unabbreviated if abbreviations else None
        code = chorosrun.main(argv, prog_name="chorosrun", standalone_mode=False, token_normalize_func=normalize)
    except click.ClickException as error:
        _say(f"{error.format_message()}\nTry chorosrun --help.")
        code = error.exit_code
    except ChorosError as error:
        _say(str(error))
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except OSError as error:  # too many open files, no memory, a full standard output
        _say(f"the operating system refused what chorosrun needs: {error}")
        code = LaunchError.exit_code
    _close_standard_streams()
    sys.exit(code)


def _say(text: str) -> None:
    """Says something on standard error, if that is read."""
    with suppress(OSError):
        click.echo(f"chorosrun: {text}", err=True)


def _open_standard_streams() -> None:
    """Opens those that are closed, so that no pipe gets their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _close_standard_streams() -> None:
    """Drops what cannot be written, which Python would complain about at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
