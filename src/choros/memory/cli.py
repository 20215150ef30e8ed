"""The ``choros memory`` command: runs a script, or loads a model, in a process of its own, and prints what it needs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from choros import durations
from choros.bench.cases import parse_ranks
from choros.bench.process_group import reason_in
from choros.bench.report import check_writable, show, write_json
from choros.errors import ChorosError, ConfigError
from choros.launch.driver.output import shown_if_slow
from choros.launch.processes.process_tree import die_with_parent, signal_group
from choros.memory.model import TrainedModel, parse_memory
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
    what = "loading" if file.suffix == _SAVED else "running"
    message = f"choros memory: {what} {file} on one process …"
    with shown_if_slow(message, durations.MEMORY_PROGRESS, partial(click.echo, err=True)):
        model = inspect_subject(file, arguments, batch)
    title = f"{file}: {model.parameters:,} parameters, {model.optimizer}"
    outlook = MemoryOutlook(title, model, numbers, fit or "", limit)
    show(outlook.table())
    write_json(json_file, outlook.as_json())
    return 0


def inspect_subject(path: Path, arguments: Sequence[str], batch: int | None) -> TrainedModel:
    """Returns what a script with ``arguments`` trains, or a saved model, which is itself trained on ``batch`` rows, if
    these are given; a ``ConfigError`` if it does not train, a ``ChorosError`` if it fails.
    """
    _check(path, arguments, batch)
    words = (
        ("load_file", str(path), str(batch or 0)) if path.suffix == _SAVED else ("run_script", str(path), *arguments)
    )
    with tempfile.TemporaryDirectory(prefix="choros-memory-") as directory:
        file, log = Path(directory) / "findings.json", Path(directory) / "output"
        code = _run((sys.executable, "-m", "choros.memory.subject", str(file), *words), log)
        found = json.loads(file.read_text()) if file.exists() else {}
        if code != 0 and "error" not in found:
            reason = reason_in(log.read_text(errors="replace"), f"exit code {code}")
            raise ChorosError(f"{path} failed before it was measured: {reason}")
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


def _run(command: tuple[str, ...], log: Path) -> int:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **_RELEASING},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            return process.wait()
        finally:
            signal_group(process.pid, signal.SIGKILL)  # what a script has started, too
            process.wait()
