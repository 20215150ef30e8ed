"""chorosrun's options, in groups, and its help text."""

from typing import Any

import click

from choros.launch.plan.arguments import FLAGS
from choros.launch.plan.flags import FILE, SECONDS, SECONDS_OR_ZERO, SWITCH, Flag, Value
from choros.launch.plan.horovod_flags import HOROVOD_FLAGS

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
    ("126, 127", "COMMAND is not executable, was not found"),
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
        shown = {flag.dest: flag.group for flag in ALL_FLAGS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                group = shown.get(parameter.name, "Information")
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


_SECONDS = click.types.FloatParamType()
_SECONDS.name = "number of seconds"


def _type_of(value: Value) -> Any:
    if value.choices:
        return click.Choice(value.choices, case_sensitive=False)
    if value.types == (int,):
        return _WholeNumberType()
    if value.is_number:
        return _SECONDS if value in (SECONDS, SECONDS_OR_ZERO) else float
    return click.Path(dir_okay=False) if value is FILE else str


def _option_of(flag: Flag) -> click.Option:
    """The option of a row; what is given is checked where it is used."""
    settings: dict[str, Any] = {"default": flag.default}
    if flag.multiple:
        settings = {"multiple": True}
    elif flag.value is SWITCH:
        settings |= {"is_flag": True}
    else:
        settings |= {"type": _type_of(flag.value), "nargs": flag.nargs}
        settings |= {"show_default": flag.value.is_number and flag.default is not None}
    names = [f"{on}/{off}" for on, off in zip(flag.on, flag.off, strict=True)] if flag.off else flag.on
    settings |= {"hidden": not flag.group, "help": flag.help, "metavar": flag.metavar}
    return click.Option([flag.dest, *names], **settings)


#: The flags that are no arguments of a job.
_REQUESTS = (
    Flag("Job", "--config-file", value=FILE, metavar="FILE",
        help="A file of flags in Horovod's YAML format, which flags on the command line override.",
        horovod="flags on the command line override it; a key that it does not know is an error"),
    Flag("Information", "--dry-run", value=SWITCH, default=False,
        help="Print the mpirun command and each rank's settings; start nothing."),
    Flag("Information", "-v --version", argument="version", value=SWITCH, default=False, horovod="",
        help="Print the versions of choros, mpi4py and mpirun."),
    Flag("Information", "-cb --check-build", argument="check_build", value=SWITCH, default=False, horovod="",
        help="Say whether a job can run here, as choros doctor does: frameworks, engines, MPI, limits."),
)  # fmt: skip

#: The rows of all flags, and of those that horovodrun has.
ALL_FLAGS: tuple[Flag, ...] = (*FLAGS.values(), *HOROVOD_FLAGS, *_REQUESTS)
OF_HOROVODRUN = tuple(flag for flag in ALL_FLAGS if flag.horovod is not None)

#: The parameters of the command.
PARAMETERS = [*map(_option_of, ALL_FLAGS), click.Argument(["command"], nargs=-1, type=click.UNPROCESSED)]
