"""``choros bench train`` and ``overhead``: the contenders of each framework, the cases, rows and tables."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from choros.bench.cases import BATCHES, TrainCase
from choros.bench.contender import (
    CHOROS,
    Contender,
    chorosrun,
    elastic,
    horovodrun,
    jax_cluster,
    logical_cpus,
    one_core,
    prepared_torch,
    process,
    tf_cluster,
    torchrun,
    xla_devices,
)
from choros.bench.figures import ratios
from choros.bench.report import Row, Table, grouped, images_per_s, seconds_of
from choros.errors import ConfigError
from choros.frameworks import is_installed
from choros.wording import count_text


def of(framework: str, *contenders: Contender) -> tuple[Contender, ...]:
    """Returns the contenders, configured for ``framework`` and requiring it."""
    environ = {"KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return tuple(replace(each, environ=environ, needs=[framework, "keras", *each.needs]) for each in contenders)


CONTENDERS = {
    "tensorflow": of(
        "tensorflow",
        Contender(CHOROS, chorosrun, process("keras_fit", "choros")),
        Contender("choros, shard_state", chorosrun, process("keras_fit", "choros", "shard_state")),
        Contender("choros, by a tape", chorosrun, process("tensorflow_loops", "tape")),
        Contender("MirroredStrategy", logical_cpus, process("keras_fit", "mirrored"), single=True),
        Contender("MultiWorkerMirroredStrategy", tf_cluster, process("tensorflow_loops", "multi_worker")),
    ),
    "torch": of(
        "torch",
        Contender(CHOROS, chorosrun, process("torch_loops", "hooked", "choros.torch")),
        Contender("choros, by Keras", chorosrun, process("keras_fit", "choros")),
        Contender("choros, by Keras, shard_state", chorosrun, process("keras_fit", "choros", "shard_state")),
        Contender("torch DDP", torchrun, process("torch_loops", "ddp")),
        Contender("torch DDP prepared", prepared_torch, process("torch_loops", "ddp")),
        Contender("Horovod", horovodrun, process("torch_loops", "hooked", "horovod.torch"), needs=["horovod"]),
    ),
    "jax": of(
        "jax",
        Contender(CHOROS, chorosrun, process("keras_fit", "choros")),
        Contender("choros, shard_state", chorosrun, process("keras_fit", "choros", "shard_state")),
        Contender("choros, by a loop", chorosrun, process("jax_loops", "choros"), needs=["optax"]),
        Contender("jax.jit on a mesh", jax_cluster, process("jax_loops", "mesh"), needs=["optax"]),
        Contender("keras.distribution (processes)", jax_cluster, process("keras_fit", "distribution")),
        Contender("keras.distribution (devices)", xla_devices, process("keras_fit", "distribution"), single=True),
    ),
}

PLAIN, ELASTIC, AGAIN = "plain Keras", "choros, elastic", "choros, again"

OVERHEAD = (
    Contender(CHOROS, chorosrun, process("keras_fit", "choros")),
    Contender(ELASTIC, elastic, process("keras_fit", "choros")),
    Contender(AGAIN, chorosrun, process("keras_fit", "choros")),
    Contender("choros, 1 rank", one_core, process("keras_fit", "choros"), single=True),
    Contender(PLAIN, one_core, process("keras_fit", "plain"), single=True),
    Contender("plain Keras, twice", chorosrun, process("keras_fit", "plain")),
)
#: The peer and the number of ranks in the rows of contenders where these are not their own name and that of the run.
_PEERS = {"choros, 1 rank": (CHOROS, 1), PLAIN: (PLAIN, 1), "plain Keras, twice": (PLAIN, 2)}
OVERHEAD_OF_PARTS = (
    Contender(CHOROS, chorosrun, process("allreduce", "parts")),
    Contender(ELASTIC, elastic, process("allreduce", "parts")),
)
#: The parts of the communication of a step of choros, with the CNN's gradients.
PARTS = ("control message", "pack", "allreduce", "unpack", "all, by the reducer")

NOTES = (
    "÷: the contender's time divided by choros'; above 1, choros takes less. CPU: of all ranks, for one step.",
    "cnn: the CNN of examples/mnist_horovod.py, 1.2 million parameters, Adam. mlp: 20 million, SGD.",
    "mlp-adam: the same with Adam, whose state shard_state divides; SGD has none.",
    "torch: all but 'choros, by Keras' train in a plain PyTorch loop. Other frameworks: all train with Keras' fit but",
    "'choros, by a tape', 'choros, by a loop', 'jax.jit on a mesh', and MultiWorkerMirroredStrategy, whose fit fails",
    "under Keras 3; these train in custom loops.",
)


def frameworks(wanted: str) -> tuple[str, ...]:
    """Returns ``wanted``, or for ``all`` all installed frameworks; a ``ConfigError`` if it, or any, is missing."""
    chosen = tuple(filter(is_installed, CONTENDERS)) if wanted == "all" else (wanted,)
    missing = [framework for framework in chosen if not is_installed(framework)]
    if missing or not chosen:
        names = " or ".join(f"'choros[{framework}]'" for framework in missing or CONTENDERS)
        raise ConfigError(f"--framework {wanted}: not installed. Install it with: pip install {names}")
    return chosen


def cases(wanted: str, batch: int | None) -> list[TrainCase]:
    """Returns the models to train: one, or ``all``; each with ``batch`` examples per rank, or with its default.

    >>> [str(case) for case in cases("all", None)]
    ['cnn, 128 a rank', 'mlp, 32 a rank', 'mlp-adam, 32 a rank']
    """
    chosen = BATCHES if wanted == "all" else [wanted]
    return [TrainCase(name, batch or BATCHES[name]) for name in chosen]


def row(bench: str, framework: str, ranks: int, case: TrainCase, name: str, summary: Row) -> Row:
    """Returns the row of a contender, with the images per second of the best round."""
    peer, number = _PEERS.get(name, (name, ranks))
    facts = {"framework": framework, **asdict(case), "images_per_s": case.batch * number / summary["best_s"]}
    return {"bench": bench, "peer": peer, "ranks": number, **summary, **facts}


def part_row(part: str, name: str, summary: Row) -> Row:
    """Returns the row of one of the ``PARTS``, measured on two ranks."""
    return {"bench": "overhead", "peer": name, "ranks": 2, **summary, "part": part, "model": "cnn"}


def sections(measured: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups the rows of training steps with the same framework, model and batch size under a label."""
    steps = [row for row in measured if "framework" in row]
    return grouped(steps, "{0[framework]}, {0[model]}, {0[batch]} a rank".format)


def overhead_tables(title: str, measured: Sequence[Row]) -> list[Table]:
    """Returns the table of training steps, with derived ratios as notes, and the table of the parts of a step."""
    steps = sections(measured)
    cells = [(label, list(map(_cells, section))) for label, section in steps]
    notes = [note for label, section in steps for note in _notes(label, section)]
    labels = {CHOROS: "the CNN's gradients", ELASTIC: "in an elastic job"}
    parts = grouped([row for row in measured if "part" in row], lambda row: labels[row["peer"]])
    lines = [(label, [(row["part"], *seconds_of(row)) for row in rows]) for label, rows in parts]
    return [
        Table(title, ("", "images/s", "best", "median", "CPU"), cells, notes),
        Table("communication, 2 ranks", ("", "best", "median", "CPU"), lines),
    ]


def _cells(row: Row) -> tuple[str, ...]:
    return f"{row['peer']}, {count_text(row['ranks'], 'rank')}", images_per_s(row), *seconds_of(row)


def _notes(label: str, section: Sequence[Row]) -> list[str]:
    found = {(row["peer"], row["ranks"]): row for row in section}
    comparisons = (
        ("time of choros, 1 rank / plain Keras", (CHOROS, 1), (PLAIN, 1), 1),
        ("speed of choros, 2 ranks / 1 rank", (CHOROS, 1), (CHOROS, 2), 2),
        ("time of an elastic job / another one, 2 ranks", (ELASTIC, 2), (CHOROS, 2), 1),
        ("what two jobs that are the same differ by", (AGAIN, 2), (CHOROS, 2), 1),
        ("what the machine allows: plain Keras, twice / once", (PLAIN, 1), (PLAIN, 2), 2),
    )
    notes = []
    for what, above, below, factor in comparisons:
        if above in found and below in found:
            best, median, cpu = (ratio * factor for ratio in ratios(found[above], found[below]))
            notes.append(f"{label}: {what}: best {best:.3f}, median {median:.3f}, CPU {cpu:.3f}")
    return notes
