"""The ``choros memory`` command: parses arguments and prints; the other modules of this package do the work."""

from functools import partial
from pathlib import Path

import click

from choros import durations
from choros.bench.cases import parse_ranks
from choros.bench.report import check_writable, show, write_json
from choros.launch.driver.output import shown_if_slow
from choros.memory.inspection import SAVED, inspect_subject
from choros.memory.model import parse_memory
from choros.memory.report import MemoryOutlook

_HELP = """\
Does it fit? What each rank needs in memory, without and with DistributedOptimizer(…, shard_state=True).

\b
Examples:
  choros memory train.py --np 1,2,4,8 --fit 24GB
  choros memory train.py --np 8 -- --batch-size 64      arguments of the script follow --
  choros memory model.keras --np 1,64 --batch 32 --json memory.json

\b
FILE is
  a script      Its Keras model trains by fit(). It is run on one process, and ended after its third training step:
                what it writes before that, it writes.
  a .keras file A model that Keras has saved, with its optimizer; Adam if it has none. --batch N also makes three
                steps on random numbers, to measure the activations.

Adam in float32 needs 16 bytes a parameter: 4 for the weight, 4 for the gradient, 8 of state. With shard_state, n ranks
need 8 + 8/n each.

\b
Exit codes:
  0         the table was printed, whether or not it fits
  1         the script failed
  2         invalid arguments, or a file that trains nothing
  130, 143  ended by Ctrl-C, by SIGTERM; the script is ended, too
"""


@click.command(help=_HELP)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-np", "--np", "ranks", default="1,2,4,8,16,32,64", show_default=True, metavar="N,...", help="Numbers of ranks."
)
@click.option("--fit", metavar="SIZE", help="The memory of a rank, such as 24GB: which number of ranks is enough?")
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", help="Of a .keras file: rows to measure activations with."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write all of it."
)
def memory(
    file: Path, arguments: tuple[str, ...], ranks: str, fit: str | None, batch: int | None, json_file: Path | None
) -> int:
    """See ``_HELP``."""
    check_writable("--json", json_file)
    numbers = sorted(parse_ranks("--np", ranks))
    limit = None if fit is None else parse_memory(fit)
    what = "loading" if file.suffix == SAVED else "running"
    message = f"choros memory: {what} {file} on one process …"
    with shown_if_slow(message, durations.MEMORY_PROGRESS, partial(click.echo, err=True)):
        model = inspect_subject(file, arguments, batch)
    title = f"{file}: {model.parameters:,} parameters, {model.optimizer}"
    outlook = MemoryOutlook(title, model, numbers, fit or "", limit)
    show(outlook.table())
    write_json(json_file, outlook.as_json())
    return 0
