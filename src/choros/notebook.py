"""The cell magic ``%%choros``: runs a notebook's cell on several ranks, by the machinery of ``choros.run``.

::

    %%choros -np 2 --give rate --result loss
    the cell, rate ──► each rank: bootstrap.execute ── what it prints ──► the cell's output
                                       └── rank 0's loss ──► a variable of the notebook
"""

import shlex
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from choros.errors import ChorosError, ConfigError, LaunchError
from choros.frameworks import installed
from choros.launch.bootstrap import execute
from choros.launch.cli import read_flags
from choros.launch.options import PARAMETERS
from choros.launch.run import run_call

#: Those of chorosrun's parameters that a cell cannot have: it is the command, and is run.
_OTHERS = ("command", "dry_run", "version", "check_build")


def _names(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    names = [name for part in text.split(",") if (name := part.strip())]
    for name in names:
        if not name.isidentifier():
            raise click.BadParameter(f"{name!r} is no name. Give names, with commas: a,b.")
    return names


_COMMAND = click.Command(
    "%%choros",
    params=[
        click.Option(["--give"], default="", metavar="NAME,...", callback=_names, help="Variables for the ranks."),
        click.Option(["--result"], default="", metavar="NAME,...", callback=_names, help="Variables of rank 0 to get."),
        *(each for each in PARAMETERS if each.name not in _OTHERS),
    ],
    callback=lambda **given: given,
    help="Runs the cell on several ranks. Its flags are chorosrun's, and two of its own.",
    context_settings={"default_map": {"grace_period": 5.0}, "max_content_width": 110},  # who stops a cell waits for it
)


def load(shell: Any) -> None:
    """Registers ``%%choros`` with ``shell``, IPython's."""

    def choros(line: str, cell: str = "") -> None:
        """Runs the cell on several ranks: %%choros -np 2 --give NAME,... --result NAME,...; %choros --help."""
        try:
            given = _parsed(line)
            if given:  # not after --help
                run_cell(shell, cell, **given)
        except (ChorosError, KeyboardInterrupt) as error:
            # What IPython shows of it: its text, which has a rank's traceback, and not where it was raised here.
            text = "".join(traceback.format_exception_only(error))
            error._render_traceback_ = text.splitlines  # type: ignore[union-attr]
            raise error from None

    shell.register_magic_function(choros, "line_cell", "choros")


def _parsed(line: str) -> Any:
    """The values of the flags of ``%%choros``, by name."""
    try:
        return _COMMAND.main(shlex.split(line, comments=True), prog_name="%%choros", standalone_mode=False)
    except (click.UsageError, ValueError) as error:
        problem = error.format_message() if isinstance(error, click.UsageError) else f"{error}."
        raise ConfigError(f"%%choros {line}: {problem} %choros --help lists the flags.") from None


def run_cell(shell: Any, cell: str, give: Sequence[str], result: Sequence[str], **flags: Any) -> None:
    """Runs ``cell`` on the ranks of a new job; ``give`` and ``result`` name variables, ``flags`` are chorosrun's."""
    arguments, sentences = read_flags(flags, lambda: "torch" in installed())
    if arguments.ps:
        raise ConfigError(
            f"--ps {arguments.ps}: expected a job without parameter servers. Write the script to a file, with "
            "%%writefile train.py, and start it: !chorosrun --ps 1 -np 2 python train.py"
        )
    variables = shell.user_ns
    missing = [name for name in give if name not in variables]
    if missing:
        raise ConfigError(f"--give {','.join(give)}: the notebook has no variable {', '.join(missing)}: set it first.")
    file, source = "<cell>", f"\n{cell}"  # its first line is that of the magic
    compile(source, file, "exec", dont_inherit=True)  # a SyntaxError here, not on each rank
    call = partial(execute, source, file, {name: variables[name] for name in give}, result)
    got = run_call(call, arguments, (f"%%choros: {sentence}" for sentence in sentences))
    values = next((each for each in got if each is not None), None)
    if values is None:
        raise LaunchError("rank 0 was lost before the cell had ended on it, and the variables of --result with it.")
    variables.update(values)
