"""The ``choros timeline`` command: reads a timeline, and prints where the time of a job went."""

from pathlib import Path

import click

from choros.errors import ConfigError
from choros.observe.timeline import parts_directory
from choros.trace.files import merge_parts, read_trace
from choros.trace.summary import summary_text
from choros.trace.trace import Trace

_HELP = """\
Reads the timeline FILE of a job: what each rank did when.

\b
Record one:
  chorosrun -np 2 --timeline-filename run.json python train.py
  CHOROS_TIMELINE=run.json mpirun -np 2 python train.py     any other launcher, or none
  hvd.start_timeline("run.json"), hvd.stop_timeline()       a part of a job, on all ranks

\b
See it:
  open https://ui.perfetto.dev and drop the file there; it stays on your machine
  choros timeline run.json --summary

\b
The summary has three tables:
  ranks          computing: outside of collectives; waiting: in collectives until all ranks have called them;
                 transferring: the rest of these, in which data moves
  waited for     the rank that called a collective last is the one for which the others waited: how often,
                 the waits of all other ranks added up, the median and the longest of these waits
  collectives    those that took longest, by name; their times are added up over all ranks

If the job was killed before it could merge the ranks' parts (FILE.parts), this command merges them to FILE. With
--summary it writes nothing, and while the job runs, it shows what the ranks have done so far.
"""


@click.command(help=_HELP)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--summary", is_flag=True, help="Print where the time went and who waited for whom.")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="With --summary: the number of collectives to list.",
)
def timeline(file: Path, summary: bool, top: int) -> int:  # fmt: skip
    """See ``_HELP``."""
    trace = trace_of(file, merge=not summary)
    if summary:
        click.echo(summary_text(trace, top), nl=False)
    else:
        ranks = "1 rank" if len(trace.ranks) == 1 else f"{len(trace.ranks)} ranks"
        click.echo(f"{file}: {ranks}, {len(trace.calls)} calls of collectives.")
        click.echo("Open it in https://ui.perfetto.dev, or add --summary.")
    return 0


def trace_of(file: Path, *, merge: bool = False) -> Trace:
    """Returns the trace in ``file``, after merging its parts to it on request; a ``ConfigError`` if there is none."""
    try:
        if merge:
            merge_parts(file)
        return read_trace(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: there is no such timeline, and no parts of one in {parts_directory(file)}. Record one with "
            f"chorosrun --timeline-filename {file}."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
