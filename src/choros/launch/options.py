"""chorosrun's options, in groups, and the help that teaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from choros.launch.plan.arguments import Arguments

__all__ = ["GroupedCommand", "GroupedOption", "with_options"]

_EXAMPLES = """\
  chorosrun -np 2 python train.py                       two processes on this machine
  chorosrun python train.py                             one for each accelerator
  chorosrun -np 8 -H a:4,b:4 python train.py            four on each of two hosts, through ssh
  chorosrun -np 4 --output-dir logs python train.py     keep what each rank prints in logs/rank.N/
  chorosrun --ps 2 -np 4 python train.py                a chief, two parameter servers and four workers
"""
_EXIT_CODES = (
    ("0", "every rank ended with 0; with --ps, the chief did"),
    ("N", "the exit code of the rank that failed first; 128 + n if signal n ended it"),
    ("2", "invalid arguments"),
    ("68", "a host cannot be reached"),
    ("70", "the job could not be started, or a host was lost"),
    ("124", "--timeout"),
    ("127", "there is no such command"),
    ("130, 143", "ended by Ctrl-C, by SIGTERM"),
)
_SIGNALS = (
    ("SIGINT, SIGTERM", "passed on to the ranks, which have --grace-period seconds to save; twice: end at once"),
    ("SIGUSR1, SIGUSR2", "passed on to the ranks"),
)

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option that knows under which heading it is listed."""

    def __init__(self, *names: Any, group: str, **rest: Any) -> None:
        super().__init__(*names, **rest)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help begins with examples, lists options by group, and ends with exit codes."""

    def format_usage(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        formatter.write_usage("chorosrun", "[OPTIONS] COMMAND [ARGUMENTS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        with formatter.section("Examples"):
            formatter.write(_EXAMPLES)
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                group = parameter.group if isinstance(parameter, GroupedOption) else "Information"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        with formatter.section("Signals"):
            formatter.write_dl(list(_SIGNALS))
        with formatter.section("Exit codes"):
            formatter.write_dl(list(_EXIT_CODES))


def _option(group: str, *names: str, **rest: Any) -> Callable[[Decorated], Decorated]:
    return click.option(*names, cls=GroupedOption, group=group, **rest)


class _WholeNumber(click.IntRange):
    name = "whole number"


class _Seconds(click.FloatRange):
    name = "number of seconds"


_POSITIVE = _Seconds(min=0, min_open=True)
_LEVELS = click.Choice(["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"], case_sensitive=False)

_OPTIONS = (
    _option("What", "-np", "--num-proc", type=_WholeNumber(min=1), metavar="N",
            help="How many ranks, or with --ps workers. Default: the slots of the hosts; or one for each accelerator "
            "here; or 1."),
    _option("What", "--ps", type=_WholeNumber(min=1), metavar="P",
            help="A job for ParameterServerStrategy: a chief, P parameter servers, and -np workers, each with its role "
            "in TF_CONFIG. It ends when the chief does, with its exit code."),
    _option("What", "--max-restarts", type=_WholeNumber(min=0), metavar="N",
            help="With --ps, how often a worker that was killed by a signal is started again. Default: 3."),
    _option("What", "--env", multiple=True, metavar="KEY[=VALUE]",
            help="An environment variable for the ranks; may be given more than once. "
            "On other hosts they get this one's environment anyway."),
    _option("Where", "-H", "--hosts", metavar="HOST:SLOTS,...", help="The hosts, and how many ranks each may run."),
    _option("Where", "-hostfile", "--hostfile", metavar="FILE", type=click.Path(dir_okay=False),
            help="The hosts, in a file with a line `host slots=N` each."),
    _option("Where", "-p", "--ssh-port", type=_WholeNumber(1, 65535), metavar="PORT",
            help="The port of their ssh servers."),
    _option("Where", "-i", "--ssh-identity-file", metavar="FILE", help="The private key to show them."),
    _option("Where", "--ssh-command", metavar="PATH", help="What to call in ssh's place, as PATH host command..."),
    _option("Where", "--network-interfaces", "--network-interface", default="", metavar="NAME,...",
            help="Communicate through these interfaces only: names that every host has, or networks like 10.0.0.0/24."),
    _option("Where", "--tcp", is_flag=True, help="Communicate through TCP only, whatever faster network there is."),
    _option("Output", "--prefix-output/--no-prefix-output", default=None,
            help="Put [rank], or [role], in front of every line. Default: if there is more than one rank."),
    _option("Output", "--output-dir", "--output-filename", metavar="DIR",
            help="Also write what each rank prints to DIR/rank.N/stdout and stderr, on this machine; with --ps to "
            "DIR/worker.N/… and so on."),
    _option("Output", "--verbose", is_flag=True, help="Show what is started, and what mpirun says."),
    _option("Output", "--log-level", type=_LEVELS, help="DEBUG and TRACE mean --verbose."),
    _option("Time", "--timeout", type=_POSITIVE, metavar="SECONDS", help="End the job after so long."),
    _option("Time", "--start-timeout", type=_POSITIVE, metavar="SECONDS",
            default=Arguments.start_timeout, show_default=True,
            envvar=("CHOROS_START_TIMEOUT", "HOROVOD_START_TIMEOUT"),
            help="How long reaching hosts and starting ranks may take."),
    _option("Time", "--grace-period", type=_Seconds(min=0), metavar="SECONDS",
            default=Arguments.grace_period, show_default=True, help="How long ranks may take to end when asked to."),
    _option("MPI", "--mpirun", metavar="PATH", help="The mpirun to use. Default: the one installed with choros."),
    _option("MPI", "--mpi-args", default="", metavar="WORDS",
            help='More arguments for mpirun, in quotes: --mpi-args="..."'),
    _option("MPI", "--binding-args", default="", metavar="WORDS",
            help="mpirun's arguments for binding and mapping, in place of choros' own binding to whole cores."),
    _option("MPI", "--mpi", is_flag=True, hidden=True, help="Horovod's flag for what is the only way here."),
    _option("Information", "--dry-run", is_flag=True, help="Print the mpirun command, and run nothing."),
    _option("Information", "-v", "--version", is_flag=True, help="Print the versions of choros, mpi4py and mpirun."),
    _option("Information", "-cb", "--check-build", is_flag=True, help="Print which frameworks and engines are there."),
)  # fmt: skip


def with_options(function: Decorated) -> Decorated:
    """Gives a click command all of chorosrun's options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
