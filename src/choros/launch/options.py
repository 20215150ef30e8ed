"""chorosrun's options, in groups, and its help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from choros.launch.plan.arguments import Arguments
from choros.launch.plan.flags import Flag, FlagValue, Seconds, WholeNumber, flag_of
from choros.launch.plan.horovod_flags import HOROVOD_FLAGS, LEVELS, HorovodFlag, Same, Sets, Value

__all__ = ["GroupedCommand", "GroupedOption", "with_options"]

_EXAMPLES = """\
  chorosrun -np 2 python train.py                       two processes on this machine
  chorosrun python train.py                             one process for each accelerator
  chorosrun -np 8 -H a:4,b:4 python train.py            four processes on each of two hosts, through ssh
  chorosrun -np 4 --output-dir logs python train.py     keep what each rank prints in logs/rank.N/
  chorosrun --ps 2 -np 4 python train.py                a chief, two parameter servers and four workers
  chorosrun -np 4 --min-np 2 python train.py            go on without ranks that die, while two are left
"""
_EXIT_CODES = (
    ("0", "every rank ended with 0; with --ps, the chief did"),
    ("N", "the exit code of the rank that failed first; 128 + n if signal n ended it"),
    ("2", "invalid arguments"),
    ("68", "a host cannot be reached"),
    (
        "69",
        "fewer ranks of an elastic job are left than --min-np, or it has lost hosts and cannot be started again; with "
        "--commit-dir, the same command goes on",
    ),
    (
        "70",
        "the job could not be started, a host was lost, a rank waited for one that had ended or for longer than "
        "--stall-shutdown, or did not end",
    ),
    ("75", "an elastic job was asked to end, and all ranks have ended with 0; schedulers may start it again"),
    ("124", "the job ran longer than --timeout"),
    ("127", "COMMAND was not found"),
    ("130, 143", "ended by Ctrl-C, by SIGTERM"),
)
_SIGNALS = (
    ("SIGINT, SIGTERM", "forwarded to the ranks, which have --grace-period seconds to save; a second one kills them"),
    ("SIGUSR1, SIGUSR2", "forwarded to the ranks; of an elastic job, a second SIGUSR1 kills them"),
)

_HOROVOD = (
    "All flags of horovodrun are accepted. Those that are not listed above change nothing, and say so: "
    "docs/horovod-launcher.md has the reasons."
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
        with formatter.section("Horovod"):
            formatter.write_text(_HOROVOD)
        with formatter.section("Signals"):
            formatter.write_dl(list(_SIGNALS))
        with formatter.section("Exit codes"):
            formatter.write_dl(list(_EXIT_CODES))


class _WholeNumberType(click.types.IntParamType):
    """A whole number, of which ``-np2`` has a part of the flag: to click that is ``-n`` with the value ``p2``."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        glued = isinstance(value, str) and param is not None and "-np" in param.opts
        return super().convert(value.removeprefix("p") if glued else value, param, ctx)


class _SecondsType(click.types.FloatParamType):
    name = "number of seconds"


_TYPES = {WholeNumber: _WholeNumberType(), Seconds: _SecondsType()}
_HOROVOD_TYPES: dict[Value, dict[str, Any]] = {
    Value.SWITCH: {"is_flag": True},
    Value.WHOLE: {"type": _WholeNumberType()},
    Value.NUMBER: {"type": float},
    Value.SHARE: {"type": float},
    Value.TEXT: {"type": str},
    Value.LEVEL: {"type": click.Choice(LEVELS, case_sensitive=False)},
}


def _option(group: str, *names: str, **rest: Any) -> Callable[[Decorated], Decorated]:
    return click.option(*names, cls=GroupedOption, group=group, **rest)


def _option_of(name: str, flag: Flag, default: object) -> Callable[[Decorated], Decorated]:
    """The option that sets the field ``name`` of ``Arguments``, which checks its value."""
    settings: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar}
    if flag.bounds is not None:
        settings |= {"type": _TYPES[type(flag.bounds)], "default": default, "show_default": default is not None}
        settings |= {"nargs": 2} if flag.value is FlagValue.TWO else {}
    elif flag.value is FlagValue.REPEATED:
        settings |= {"multiple": True}
    elif flag.value is FlagValue.SWITCH:
        settings |= {"is_flag": True, "default": default}
    else:
        settings |= {"type": click.Path(dir_okay=False) if flag.value is FlagValue.FILE else str, "default": default}
    return _option(flag.group, name, *flag.names, **settings)


def _option_of_horovod(flag: HorovodFlag) -> Callable[[Decorated], Decorated]:
    """The option of a flag of horovodrun that sets a variable, which help lists, or changes nothing."""
    shown = flag.does if isinstance(flag.does, Sets) and flag.does.group else None
    names = [f"{on}/{off}" for on, off in zip(flag.on, flag.off, strict=True)] if flag.off else flag.on
    return _option(
        shown.group if shown else "",
        flag.dest,
        *names,
        default=None,
        hidden=shown is None,
        help=shown.help if shown else "",
        metavar=flag.metavar,
        **_HOROVOD_TYPES[flag.value],
    )


#: The options that are no arguments of a job.
_OPTIONS = (
    _option("Job", "--config-file", type=click.Path(dir_okay=False), metavar="FILE",
            help="A file of flags in Horovod's YAML format, which flags on the command line override."),
    _option("Information", "--dry-run", is_flag=True, help="Print the mpirun command and each rank's settings; start "
            "nothing."),
    _option("Information", "-v", "--version", is_flag=True, help="Print the versions of choros, mpi4py and mpirun."),
    _option("Information", "-cb", "--check-build", is_flag=True,
            help="Print which frameworks and engines are installed."),
)  # fmt: skip


def with_options(function: Decorated) -> Decorated:
    """Adds all of chorosrun's options to a click command."""
    arguments = [_option_of(each.name, flag, each.default) for each in fields(Arguments) if (flag := flag_of(each))]
    horovod = [_option_of_horovod(flag) for flag in HOROVOD_FLAGS if not isinstance(flag.does, Same)]
    for option in reversed([*arguments, *horovod, *_OPTIONS]):
        function = option(function)
    return function
