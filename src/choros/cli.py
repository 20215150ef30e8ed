"""The ``choros`` command and its subcommands. ``chorosrun`` is a separate command, as ``horovodrun`` is."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from choros import __version__
from choros.errors import ChorosError

_HELP = """\
Tools for data-parallel deep learning with choros.

\b
Examples:
  chorosrun -np 2 python train.py     train on two processes (chorosrun --help)
  choros bench allreduce              compare choros with MPI, Gloo and memcpy on this machine
  choros bench train                  compare training steps with DDP, tf.distribute, keras.distribution
  choros doctor                       whether a job can run here, and how to mend what is broken
  choros report run.json              the page about a job, from its record; --compare: two jobs side by side
  choros stacks                       what the ranks of a running job do: the stacks of all their threads
  choros top                          the running job: progress, rates, what each rank's time goes to
  choros timeline run.json --summary  where the time of a recorded job went, and who waited for whom
  choros forecast run.json --np 64 …  what this job would take on ranks that are not rented yet
  choros deploy kubernetes --np 8 …   what a job needs on Kubernetes, to be applied by kubectl
  choros memory train.py --fit 24GB   what each rank needs in memory, and on how many ranks it fits
"""


#: The module of each subcommand, which is loaded when it runs or is listed.
_MODULES = {
    "bench": "choros.bench.cli",
    "deploy": "choros.deploy",
    "doctor": "choros.doctor.cli",
    "forecast": "choros.forecast.cli",
    "memory": "choros.memory.cli",
    "report": "choros.report.cli",
    "stacks": "choros.launch.cli",
    "timeline": "choros.trace.cli",
    "top": "choros.view.cli",
}


class _Tools(click.Group):
    def list_commands(self, _context: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        return getattr(import_module(_MODULES[name]), name) if name in _MODULES else None


@click.group(cls=_Tools, help=_HELP, context_settings={"max_content_width": 110}, invoke_without_command=True)
@click.version_option(__version__, prog_name="choros", message="%(prog)s %(version)s")
@click.pass_context
def choros(context: click.Context) -> None:
    """See ``_HELP``."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``choros`` with ``arguments`` (default: this process's command line) and exits."""
    # An exception, so that every ``with`` block ends its processes.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = choros.main(None if arguments is None else list(arguments), prog_name="choros", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "choros"
        click.echo(f"choros: {error.format_message()}\nTry {command} --help.", err=True)
        code = error.exit_code
    except ChorosError as error:
        click.echo(f"choros: {error}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except OSError as error:  # such as a full disk for what is printed
        click.echo(f"choros: the operating system refused what choros needs: {error}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest at its end
        code = 1
    sys.exit(code)
