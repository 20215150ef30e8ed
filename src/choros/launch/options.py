"""chorosrun's options, in groups, and its help text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from choros.launch.plan.arguments import Arguments

__all__ = ["GroupedCommand", "GroupedOption", "with_options"]

_EXAMPLES = """\
  chorosrun -np 2 python train.py                       two processes on this machine
  chorosrun python train.py                             one process for each accelerator
  chorosrun -np 8 -H a:4,b:4 python train.py            four processes on each of two hosts, through ssh
  chorosrun -np 4 --output-dir logs python train.py     keep what each rank prints in logs/rank.N/
  chorosrun --ps 2 -np 4 python train.py                a chief, two parameter servers and four workers
"""
_EXIT_CODES = (
    ("0", "every rank ended with 0; with --ps, the chief did"),
    ("N", "the exit code of the rank that failed first; 128 + n if signal n ended it"),
    ("2", "invalid arguments"),
    ("68", "a host cannot be reached"),
    ("70", "the job could not be started, a host was lost, or a rank waited for one that had ended"),
    ("124", "the job ran longer than --timeout"),
    ("127", "COMMAND was not found"),
    ("130, 143", "ended by Ctrl-C, by SIGTERM"),
)
_SIGNALS = (
    ("SIGINT, SIGTERM", "forwarded to the ranks, which have --grace-period seconds to save; a second one kills them"),
    ("SIGUSR1, SIGUSR2", "forwarded to the ranks"),
)

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option with the heading under which the help lists it."""

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
    _option("Job", "-np", "--num-proc", type=_WholeNumber(min=1), metavar="N",
            help="Number of ranks, or of workers with --ps. Default: the number of slots of the hosts, or of a "
            "scheduler's allocation; without either, the number of accelerators of this machine, at least 1."),
    _option("Job", "--ps", type=_WholeNumber(min=1), metavar="P",
            help="Start a job for ParameterServerStrategy: a chief, P parameter servers and -np workers, each with its "
            "role in TF_CONFIG. The job ends when the chief ends, with the chief's exit code."),
    _option("Job", "--max-restarts", type=_WholeNumber(min=0), metavar="N",
            help="With --ps: how many times a worker that was killed by a signal is restarted. Default: 3."),
    _option("Job", "--env", multiple=True, metavar="KEY[=VALUE]",
            help="Set an environment variable for the ranks; may be given more than once. Ranks on other hosts "
            "inherit this host's environment without it."),
    _option("Hosts", "-H", "--hosts", metavar="HOST:SLOTS,...",
            help="The hosts, with the number of slots (ranks) of each."),
    _option("Hosts", "-hostfile", "--hostfile", metavar="FILE", type=click.Path(dir_okay=False),
            help="A file of hosts, one line `host slots=N` for each."),
    _option("Hosts", "-p", "--ssh-port", type=_WholeNumber(1, 65535), metavar="PORT",
            help="The port of the hosts' ssh servers."),
    _option("Hosts", "-i", "--ssh-identity-file", metavar="FILE", help="The private key for ssh."),
    _option("Hosts", "--ssh-command", metavar="PROGRAM",
            help="A program to use instead of ssh, with its arguments; it is called as PROGRAM HOST COMMAND..."),
    _option("Hosts", "--network-interfaces", "--network-interface", default="", metavar="NAME,...",
            help="Communicate only through these interfaces: names that exist on every host, or networks such as "
            "10.0.0.0/24."),
    _option("Hosts", "--tcp", is_flag=True, help="Communicate only through TCP, even if a faster network exists."),
    _option("Output", "--prefix-output/--no-prefix-output", default=None,
            help="Prefix every line with [rank], or [role] with --ps. Default: with more than one rank."),
    _option("Output", "--output-dir", "--output-filename", metavar="DIR",
            help="Also write each rank's output to DIR/rank.N/stdout and stderr on this machine; with --ps, to "
            "DIR/chief, DIR/ps.N and DIR/worker.N."),
    _option("Output", "--verbose", is_flag=True, help="Show the mpirun command, each rank's settings and mpirun's "
            "messages."),
    _option("Output", "--log-level", type=_LEVELS, help="DEBUG or TRACE: --verbose, and the events of all ranks."),
    _option("Time", "--timeout", type=_POSITIVE, metavar="SECONDS", help="Stop the job after this time."),
    _option("Time", "--start-timeout", type=_POSITIVE, metavar="SECONDS",
            default=Arguments.start_timeout, show_default=True,
            envvar=("CHOROS_START_TIMEOUT", "HOROVOD_START_TIMEOUT"),
            help="How long connecting to the hosts and starting the ranks may take."),
    _option("Time", "--grace-period", type=_Seconds(min=0), metavar="SECONDS",
            default=Arguments.grace_period, show_default=True,
            help="How long ranks may take to end after SIGINT or SIGTERM."),
    _option("MPI", "--mpirun", metavar="PATH", help="The mpirun to use. Default: the one installed with choros."),
    _option("MPI", "--mpi-args", default="", metavar="ARGUMENTS",
            help='Additional arguments for mpirun, in quotes: --mpi-args="..."'),
    _option("MPI", "--binding-args", default="", metavar="ARGUMENTS",
            help="mpirun's arguments for binding and mapping, instead of choros' own binding to whole cores."),
    _option("MPI", "--mpi", is_flag=True, hidden=True, help="Accepted for Horovod's sake: MPI is the only launcher."),
    _option("Information", "--dry-run", is_flag=True, help="Print the mpirun command and each rank's settings; start "
            "nothing."),
    _option("Information", "-v", "--version", is_flag=True, help="Print the versions of choros, mpi4py and mpirun."),
    _option("Information", "-cb", "--check-build", is_flag=True,
            help="Print which frameworks and engines are installed."),
)  # fmt: skip


def with_options(function: Decorated) -> Decorated:
    """Adds all of chorosrun's options to a click command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
