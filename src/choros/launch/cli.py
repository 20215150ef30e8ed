"""``chorosrun``: parses and prints; everything else is in the modules beside this one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from choros.errors import ChorosError, ConfigError
from choros.launch.build_report import build_text, version_text
from choros.launch.driver.launcher import draft, launch
from choros.launch.driver.outcome import judge
from choros.launch.driver.output import Files, Output, Screen, use_colour
from choros.launch.driver.supervisor import Limits
from choros.launch.plan.accelerators import count_accelerators
from choros.launch.plan.dry_run import draft_text
from choros.launch.plan.environment import parse_variables
from choros.launch.plan.hosts import Host, own_names, parse_hostfile, parse_hosts, total_slots
from choros.launch.plan.job import Job, Ssh
from choros.launch.plan.mpi_implementations import Mpirun, detect_mpirun
from choros.launch.plan.options import GroupedCommand, with_options
from choros.launch.plan.unsupported_flags import refusal
from choros.launch.protocol.wrapper_options import Options

__all__ = ["main"]

_RESTARTS = 3
#: Where Kubernetes' MPI operator and other tools tell mpirun its hosts.
_DEFAULT_HOSTFILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")


@click.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False, "max_content_width": 110})
@with_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def chorosrun(command: tuple[str, ...], **given: Any) -> int:
    """Runs COMMAND as several processes that train one model together."""
    if given["version"] or given["check_build"]:
        text = version_text if given["version"] else build_text
        click.echo(text(_mpirun_or_sentence(given["mpirun"])))
        return 0
    if not command:
        raise click.UsageError("no command given. Example: chorosrun -np 2 python train.py")
    mpirun = detect_mpirun(given["mpirun"])
    job = make_job(command, given)
    if given["dry_run"]:
        click.echo(draft_text(job, draft(job, mpirun, os.environ), os.environ))
        return 0
    if not job.remote:
        problem = missing_command(command[0])
        if problem is not None:
            click.echo(f"chorosrun: {problem}", err=True)
            return 127
    return _run(job, mpirun, given)


def make_job(command: Sequence[str], given: dict[str, Any]) -> Job:
    """The job that the options ``given`` describe."""
    hosts = _hosts(given["hosts"], given["hostfile"])
    servers = given["ps"] or 0
    names = own_names()
    return Job(
        command=tuple(command),
        size=_size(given["num_proc"], servers, hosts),
        hosts=hosts,
        remote=tuple(host for host in hosts if host.name not in names),
        environment=parse_variables(given["env"], os.environ),
        ssh=Ssh(given["ssh_port"], given["ssh_identity_file"], given["ssh_command"]),
        network_interfaces=tuple(_split(given["network_interfaces"])),
        tcp=given["tcp"],
        mpi_args=tuple(shlex.split(given["mpi_args"])),
        binding_args=tuple(shlex.split(given["binding_args"])),
        options=Options(bind=not given["binding_args"], restarts=_restarts(given["max_restarts"], servers)),
        servers=servers,
    )


def _size(asked: int | None, servers: int, hosts: Sequence[Host]) -> int:
    """How many processes there are to be, when there are ``servers`` and ``asked`` ranks or workers."""
    besides = 1 + servers if servers else 0
    if asked is None and hosts:
        return total_slots(hosts)
    return (asked or count_accelerators() or 1) + besides


def _restarts(asked: int | None, servers: int) -> int:
    if asked is not None and not servers:
        raise ConfigError(
            "--max-restarts is about the workers beside parameter servers: give --ps too, or leave it out."
        )
    return (_RESTARTS if asked is None else asked) if servers else 0


def _hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile both name hosts: give one of them.")
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is None:
        hostfile = next((os.environ[name] for name in _DEFAULT_HOSTFILES if os.environ.get(name)), None)
    return parse_hostfile(Path(hostfile)) if hostfile is not None else ()


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def missing_command(program: str) -> str | None:
    """Why ``program`` cannot be run here, ``None`` if it can."""
    if shutil.which(program) is not None:
        return None
    path = Path(program)
    if path.suffix == ".py" and path.is_file():
        return f"{program!r} is not executable. A script of Python's is run with: chorosrun … python {program}"
    return f"there is no command {program!r}." if not path.exists() else f"{program!r} is not executable."


def _mpirun_or_sentence(path: str | None) -> Mpirun | str:
    try:
        return detect_mpirun(path)
    except ChorosError as error:
        return str(error)


def _run(job: Job, mpirun: Mpirun, given: dict[str, Any]) -> int:
    limits = Limits(given["start_timeout"], given["timeout"], given["grace_period"])
    prefix = job.size > 1 if given["prefix_output"] is None else given["prefix_output"]
    colour = use_colour(os.environ, sys.stdout.isatty() and sys.stderr.isatty())
    screen = Screen(sys.stdout.buffer, sys.stderr.buffer, prefix=prefix, colour=colour, roles=job.roles)
    directory = given["output_dir"]
    output = Output(screen, Files(Path(directory), job.roles) if directory else None)
    verbose = given["verbose"] or given["log_level"] in ("TRACE", "DEBUG")
    verdict = judge(launch(job, mpirun, os.environ, output, limits, verbose=verbose), limits)
    for line in verdict.lines:
        screen.say(line)
    return verdict.exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``chorosrun`` with ``arguments``, those of this process by default, and ends it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        refused = refusal(words, _flags_with_value())
        if refused is not None:
            raise ConfigError(refused)
        code = chorosrun.main(words, prog_name="chorosrun", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"chorosrun: {error.format_message()}\nTry chorosrun --help.", err=True)
        code = error.exit_code
    except ChorosError as error:
        click.echo(f"chorosrun: {error}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)


def _flags_with_value() -> frozenset[str]:
    options = (parameter for parameter in chorosrun.params if isinstance(parameter, click.Option))
    return frozenset(flag for option in options if not option.is_flag for flag in option.opts)


if __name__ == "__main__":
    main()
