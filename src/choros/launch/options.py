"""chorosrun's options, in groups, and its help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from choros.launch.plan.arguments import Arguments
from choros.launch.plan.flags import Flag, FlagValue, Seconds, WholeNumber, flag_of

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
    (
        "70",
        "the job could not be started, a host was lost, a rank waited for one that had ended, or did not end",
    ),
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


class _WholeNumberType(click.types.IntParamType):
    name = "whole number"


class _SecondsType(click.types.FloatParamType):
    name = "number of seconds"


_TYPES = {WholeNumber: _WholeNumberType(), Seconds: _SecondsType()}
_LEVELS = click.Choice(["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"], case_sensitive=False)


def _option(group: str, *names: str, **rest: Any) -> Callable[[Decorated], Decorated]:
    return click.option(*names, cls=GroupedOption, group=group, **rest)


def _option_of(name: str, flag: Flag, default: object) -> Callable[[Decorated], Decorated]:
    """The option that sets the field ``name`` of ``Arguments``, which checks its value."""
    settings: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar, "envvar": flag.environ or None}
    if flag.bounds is not None:
        settings |= {"type": _TYPES[type(flag.bounds)], "default": default, "show_default": default is not None}
    elif flag.value is FlagValue.REPEATED:
        settings |= {"multiple": True}
    elif flag.value is FlagValue.SWITCH:
        settings |= {"is_flag": True, "default": default}
    else:
        settings |= {"type": click.Path(dir_okay=False) if flag.value is FlagValue.FILE else str, "default": default}
    return _option(flag.group, name, *flag.names, **settings)


#: The options that are no arguments of a job.
_OPTIONS = (
    _option("Output", "--log-level", type=_LEVELS, help="DEBUG or TRACE: --verbose, and the events of all ranks."),
    _option("MPI", "--mpi", is_flag=True, hidden=True, help="Accepted for Horovod's sake: MPI is the only launcher."),
    _option("Information", "--dry-run", is_flag=True, help="Print the mpirun command and each rank's settings; start "
            "nothing."),
    _option("Information", "-v", "--version", is_flag=True, help="Print the versions of choros, mpi4py and mpirun."),
    _option("Information", "-cb", "--check-build", is_flag=True,
            help="Print which frameworks and engines are installed."),
)  # fmt: skip


def with_options(function: Decorated) -> Decorated:
    """Adds all of chorosrun's options to a click command."""
    arguments = [_option_of(each.name, flag, each.default) for each in fields(Arguments) if (flag := flag_of(each))]
    for option in reversed([*arguments, *_OPTIONS]):
        function = option(function)
    return function
