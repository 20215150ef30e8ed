"""The ``chorosrun`` command: parses arguments and prints; the other modules of this package do the work."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import click

from choros.config import LOG_LEVEL
from choros.errors import ChorosError, ConfigError, LaunchError
from choros.launch.driver.accelerators import count_accelerators
from choros.launch.driver.host_names import own_names
from choros.launch.driver.launcher import dry_run_command, launch
from choros.launch.driver.line_merger import LineMerger
from choros.launch.driver.mpirun_detection import detect_mpirun
from choros.launch.driver.outcome import outcome_of
from choros.launch.driver.output import DescriptorSink, Files, Output, Screen, use_colour
from choros.launch.options import GroupedCommand, with_options
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.dry_run import dry_run_text
from choros.launch.plan.environment import parse_variables
from choros.launch.plan.job import Job
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.plan.unsupported_flags import unsupported_flag_reason

__all__ = ["main"]


@click.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False, "max_content_width": 110})
@with_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def chorosrun(command: tuple[str, ...], **given: Any) -> int:
    """Runs COMMAND as several processes that train one model together."""
    if given["version"] or given["check_build"]:
        from choros.launch.build_report import build_text, version_text  # takes 10 ms; only these two flags need it

        text = version_text if given["version"] else build_text
        click.echo(text(_mpirun_or_error(given["mpirun"])))
        return 0
    if not command:
        raise click.UsageError("no command given. Example: chorosrun -np 2 python train.py")
    arguments = arguments_of(given)
    mpirun = detect_mpirun(arguments.mpirun)
    job = arguments.job(command, os.environ, own_names, count_accelerators)
    if given["dry_run"]:
        click.echo(dry_run_text(job, dry_run_command(job, mpirun, os.environ), os.environ))
        return 0
    if not job.remote:
        problem = missing_command(command[0])
        if problem is not None:
            click.echo(f"chorosrun: {problem}", err=True)
            return 127
    return _run(job, mpirun, arguments)


def arguments_of(given: Mapping[str, Any]) -> Arguments:
    """Returns the arguments that the options in ``given`` set."""
    values = {each.name: given[each.name] for each in fields(Arguments) if each.name in given}
    debug = given["log_level"] in ("TRACE", "DEBUG")
    env = parse_variables(given["env"], os.environ)
    if debug:
        env = {LOG_LEVEL.name: "DEBUG", **env}
    return Arguments(**{**values, "env": env, "verbose": given["verbose"] or debug})


def missing_command(program: str) -> str | None:
    """Returns why ``program`` cannot be run on this host; ``None`` if it can."""
    if shutil.which(program) is not None:
        return None
    path = Path(program)
    if path.suffix == ".py" and path.is_file():
        return f"{program!r} is not executable. A Python script is run with: chorosrun … python {program}"
    return f"command not found: {program!r}." if not path.exists() else f"{program!r} is not executable."


def _mpirun_or_error(path: str | None) -> Mpirun | str:
    try:
        return detect_mpirun(path)
    except ChorosError as error:
        return str(error)


def _run(job: Job, mpirun: Mpirun, arguments: Arguments) -> int:
    colour = use_colour(os.environ, os.isatty(1) and os.isatty(2))
    prefix = arguments.prefix(job.size)
    screen = Screen(DescriptorSink(1), DescriptorSink(2), prefix=prefix, colour=colour, roles=job.roles)
    directory = arguments.output_dir
    files = Files(Path(directory), job.size, job.roles) if directory else None
    output = Output(screen, files, LineMerger(job.size) if arguments.merge(job.size, os.environ) else None)
    limits = arguments.limits
    outcome = outcome_of(launch(job, mpirun, os.environ, output, limits, verbose=arguments.verbose), limits)
    for line in outcome.lines:
        screen.show(line)
    return outcome.exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``chorosrun`` with ``arguments`` (default: this process's command line) and exits."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in ``chorosrun … &`` in a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        reason = unsupported_flag_reason(argv, _flags_with_value())
        if reason is not None:
            raise ConfigError(reason)
        code = chorosrun.main(argv, prog_name="chorosrun", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"chorosrun: {error.format_message()}\nTry chorosrun --help.", err=True)
        code = error.exit_code
    except ChorosError as error:
        click.echo(f"chorosrun: {error}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except OSError as error:  # too many open files, no memory, a full standard output
        with suppress(OSError):
            click.echo(f"chorosrun: the operating system refused what chorosrun needs: {error}", err=True)
        code = LaunchError.exit_code
    _close_standard_streams()
    sys.exit(code)


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


def _flags_with_value() -> frozenset[str]:
    options = (parameter for parameter in chorosrun.params if isinstance(parameter, click.Option))
    return frozenset(flag for option in options if not option.is_flag for flag in option.opts)


if __name__ == "__main__":
    main()
