"""``choros bench memory``: what ranks need at most without and with ``shard_state``; and what a rank runs.

Jobs run one after the other: of several at the same time, one would measure the memory of all.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from choros import durations
from choros.bench.contender import CHOROS, SAFE, ContenderFailed, chorosrun
from choros.bench.process_group import run_to_end
from choros.bench.report import Row, Table, grouped
from choros.observe.processes import peak_bytes
from choros.wording import bytes_text, count_text

#: The layers of the model, the rows of a batch of a rank, and the steps.
LAYERS, BATCH, STEPS = 25, 8, 4
#: The least part of the unsharded memory that is expected with Adam on two ranks: 12 of 16 bytes, and some for buffers.
BOUND = 0.80


def width_of(parameters: int, layers: int = LAYERS) -> int:
    """Returns the width of each of ``layers`` square layers that have about ``parameters`` together.

    >>> width_of(100_000_000)
    2000
    """
    return max(1, round(math.sqrt(parameters / layers)))


def measure(framework: str, shard_state: bool, ranks: int, parameters: int) -> Row:
    """Trains in a job of its own, and returns what the rank needed that needs most; or raises ``ContenderFailed``."""
    with tempfile.TemporaryDirectory(prefix="choros-bench-") as directory:
        (command,) = chorosrun(ranks, ["-m", "choros.bench.memory", directory, str(parameters), str(shard_state)])
        environ = {**SAFE, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
        run_to_end(replace(command, environ=environ), durations.BENCH_ANSWER)
        each = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]
    most = max(each, key=lambda figures: figures["peak"] - figures["before"])
    return row_of(framework, shard_state, ranks, most["parameters"], most["before"], most["peak"])


def row_of(framework: str, shard_state: bool, ranks: int, parameters: int, before: int, peak: int) -> Row:
    """Returns the row of the JSON file; bytes ``before``: after ``init`` and the ``fit`` of a tiny model, which imports
    the rest, ``peak``: after training; of training: their difference, without what the process needs in any case.
    """
    about = {"bench": "memory", "peer": CHOROS, "framework": framework, "shard_state": shard_state, "ranks": ranks}
    sizes = {"before_bytes": before, "peak_bytes": peak, "training_bytes": peak - before}
    return {**about, "parameters": parameters, **sizes}


def measure_all(
    frameworks: Sequence[str], ranks: int, parameters: int, show_progress: Callable[[str], None]
) -> tuple[list[Row], list[str]]:
    """Returns the rows of all ``frameworks``, and a sentence for each job that failed."""
    rows: list[Row] = []
    failed: list[str] = []
    for framework in frameworks:
        for shard_state in (False, True):
            show_progress(f"{framework}: {_label(shard_state)}")
            try:
                rows.append(measure(framework, shard_state, ranks, parameters))
            except ContenderFailed as failure:
                failed.append(f"{framework}, {_label(shard_state)}: {failure}")
    return rows, failed


def ratios(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Returns what a framework needs with ``shard_state``, divided by what it needs without: of training alone, and of
    all; ``None`` if one is missing.

    >>> rows = [row_of("jax", False, 2, 25, 100, 300), row_of("jax", True, 2, 25, 100, 250)]
    >>> [round(ratio, 3) for ratio in ratios(rows)]
    [0.75, 0.833]
    """
    found = {row["shard_state"]: row for row in rows}
    if len(found) < 2:
        return None
    of_training, of_all = (found[True][name] / found[False][name] for name in ("training_bytes", "peak_bytes"))
    return of_training, of_all


def table(rows: Sequence[Row]) -> Table:
    """Returns the table of all frameworks, with their ratios as notes."""
    groups = grouped(rows, lambda row: str(row["framework"]))
    ranks, parameters = rows[0]["ranks"], rows[0]["parameters"]
    title = f"memory of a rank, {count_text(ranks, 'rank')}, {parameters / 1e6:.3g} million parameters, Adam"
    notes = [f"{label}: {_sentence(found, ranks)}" for label, group in groups if (found := ratios(group))]
    notes.append(
        "before: after imports, init and the fit of a tiny model; peak: after training; training: their difference."
    )
    columns = ("", "before", "peak", "training", "a parameter")
    return Table(title, columns, [(label, [_cells(row) for row in group]) for label, group in groups], notes)


def _sentence(found: tuple[float, float], ranks: int) -> str:
    training, all_of_it = found
    verdict = f", {'within' if training <= BOUND else 'above'} the bound of {BOUND:.2f}" if ranks == 2 else ""
    return f"with shard_state {training:.3f} of the memory of training{verdict}; {all_of_it:.3f} of the whole process"


def _cells(row: Row) -> list[str]:
    sizes = (bytes_text(row[name]) for name in ("before_bytes", "peak_bytes", "training_bytes"))
    return [_label(row["shard_state"]), *sizes, f"{row['training_bytes'] / row['parameters']:.1f} bytes"]


def _label(shard_state: bool) -> str:
    return "with shard_state" if shard_state else "without"


def train(layers: int, width: int, shard_state: bool) -> int:
    """Trains dense layers of ``width`` × ``width`` weights for some steps, as users of ``shard_state`` do; returns the
    number of parameters.
    """
    import keras
    import numpy as np

    import choros.keras as hvd

    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=shard_state), "mse")
    rows = np.random.default_rng(hvd.rank()).random((STEPS * BATCH, width), np.float32)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(rows, rows, batch_size=BATCH, callbacks=callbacks, shuffle=False, verbose=0)
    return int(model.count_params())


def main(directory: str, parameters: str, shard_state: str) -> None:
    """Runs a rank; writes ``RANK.json``: the peaks after a tiny model's ``fit``, which imports the rest, and in all."""
    import choros.keras as hvd

    hvd.init()
    hvd.pin_device()
    sliced = shard_state == "True"
    train(2, 4, sliced)
    before = peak_bytes()
    count = train(LAYERS, width_of(int(parameters)), sliced)
    figures = {"before": before, "peak": peak_bytes(), "parameters": count}
    (Path(directory) / f"{hvd.rank()}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
