"""The ``choros memory`` command: has a process of its own run a script, or load a model; prints what a rank needs."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from choros import durations
from choros.bench.cases import parse_ranks
from choros.bench.contender import ContenderFailed, LaunchCommand
from choros.bench.process_group import run_to_end
from choros.bench.report import FILE, Table, check_writable, show, write_json
from choros.errors import ChorosError, ConfigError
from choros.launch.driver.output import shown_if_slow
from choros.memory.model import BY_VARIABLES, UNDIVIDED, Need, TrainedModel, first_fit, parse_memory, rank_bytes
from choros.wording import bytes_text, count_text

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

#: How Keras' files end.
_SAVED = ".keras"
#: Makes TensorFlow return what a step has needed to the system, so that the next step's need is seen.
_RELEASING = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


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
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write all of it.")
def memory(
    file: Path, arguments: tuple[str, ...], ranks: str, fit: str | None, batch: int | None, json_file: Path | None
) -> int:
    """See ``_HELP``."""
    check_writable("--json", json_file)
    numbers = sorted(parse_ranks("--np", ranks))
    limit = None if fit is None else parse_memory(fit)
    what = "loading" if file.suffix == _SAVED else "running"
    message = f"choros memory: {what} {file} on one process …"
    with shown_if_slow(message, durations.MEMORY_PROGRESS, partial(click.echo, err=True)):
        model = inspect_subject(file, arguments, batch)
    without, sliced = ([rank_bytes(model, each, shard_state=way) for each in numbers] for way in (False, True))
    title = f"{file}: {model.parameters:,} parameters, {model.optimizer}"
    show(table(title, model, without, sliced, fit or "", limit))
    write_json(json_file, as_json(model, without, sliced, limit))
    return 0


def inspect_subject(path: Path, arguments: Sequence[str], batch: int | None) -> TrainedModel:
    """Returns what a script with ``arguments`` trains, or a saved model, which is itself trained on ``batch`` rows, if
    these are given; a ``ConfigError`` if it does not train, a ``ChorosError`` if it fails.
    """
    _check(path, arguments, batch)
    words = ("load_file", path, batch or 0) if path.suffix == _SAVED else ("run_script", path, *arguments)
    problem = ""
    with tempfile.TemporaryDirectory(prefix="choros-memory-") as directory:
        file = Path(directory) / "findings.json"
        argv = (sys.executable, "-P", "-m", "choros.memory.subject", str(file), *map(str, words))
        quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3")}
        try:
            run_to_end(LaunchCommand(argv, {**quiet, **_RELEASING}))
        except ContenderFailed as failure:
            problem = str(failure)
        found = json.loads(file.read_text()) if file.exists() else {}
    if problem and "error" not in found:
        raise ChorosError(f"{path} failed before it was measured: {problem}")
    if "model" not in found:
        raise ConfigError(found.get("error", f"{path} has ended its process without a training step."))
    return TrainedModel.from_json(found["model"])


def _check(path: Path, arguments: Sequence[str], batch: int | None) -> None:
    is_saved = path.suffix == _SAVED
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file. Give a training script, or a model's {_SAVED} file.")
    if not is_saved and path.suffix != ".py":
        raise ConfigError(f"{path}: expected a Python script (.py) or a model that Keras has saved ({_SAVED}).")
    if not is_saved and batch is not None:
        raise ConfigError(f"--batch {batch}: only for a model's file. A script has its own batch size.")
    if is_saved and arguments:
        raise ConfigError(f"{' '.join(arguments)}: a model's file takes no arguments; a script does.")


def as_json(model: TrainedModel, without: Sequence[Need], sliced: Sequence[Need], limit: int | None) -> dict[str, Any]:
    """Returns the content of the JSON file: what ranks need ``without`` shard_state, and with it."""
    fits: dict[str, Any] = {}
    if limit is not None:
        first = {"without_shard_state": first_fit(without, limit), "with_shard_state": first_fit(sliced, limit)}
        fits = {"limit": limit, "first_that_fits": first}
    return {
        "optimizer": model.optimizer,
        "assumed": model.assumed,
        "parameters": model.parameters,
        "rest": model.rest,
        **fits,
        "needs": [*without, *sliced],
    }


def table(
    title: str,
    model: TrainedModel,
    without: Sequence[Need],
    sliced: Sequence[Need],
    fit: str,
    limit: int | None,
) -> Table:
    """Returns the table that is printed; ``fit``: the text of the ``limit``."""
    heads = ["", "weights", "gradients", "state", "buffers", "activations", "a rank"]
    heads += [f"fits {fit}"] if fit else []
    sections = [
        ("without shard_state", [_cells("any number of ranks", without[0], limit)]),
        ("with shard_state", [_cells(count_text(each["ranks"], "rank"), each, limit) for each in sliced]),
    ]
    notes = _notes(model)
    if limit is not None:
        first = first_fit(sliced, limit)
        if first_fit(without, limit) is not None:
            notes.append(f"It fits {fit} without shard_state, on any number of ranks.")
        elif first is not None:
            notes.append(f"It fits {fit} with shard_state from {count_text(first, 'rank')} on; never without.")
        else:
            notes.append(f"It does not fit {fit} on any of these numbers of ranks.")
    return Table(title, heads, sections, notes)


def _cells(name: str, need: Need, limit: int | None) -> list[str]:
    sizes = [need[name] for name in ("weights", "gradients", "state", "buffers", "activations", "total")]
    fits = [] if limit is None else ["yes" if need["total"] <= limit else "no"]
    return [name, *("–" if size is None else bytes_text(size) for size in sizes), *fits]


def _notes(model: TrainedModel) -> list[str]:
    notes = ["The file has no optimizer: the state is that of Adam."] if model.assumed else []
    if model.division == UNDIVIDED:
        notes.append(f"shard_state does not divide the state of {model.optimizer}: each rank has all of it.")
    elif model.division == BY_VARIABLES:
        notes.append(f"{model.optimizer} needs whole variables: the state of each is on one rank.")
    if model.activations is None:
        notes.append(
            "activations were not measured, and are not in the sum: a script needs three steps, a file --batch N; "
            "on Linux, without an accelerator."
        )
    else:
        notes.append("activations: what a step needs besides, measured; each rank keeps the batch size of one.")
    if model.rest is not None:
        notes.append(f"Not in the sum: {bytes_text(model.rest)} of the process: Python, the framework, data.")
    return notes
