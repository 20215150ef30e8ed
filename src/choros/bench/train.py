"""``choros bench train``: the contenders of each framework, the cases, rows and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from choros.bench.cases import BATCHES, TrainCase
from choros.bench.contender import (
    CHOROS,
    Contender,
    chorosrun,
    horovodrun,
    jax_cluster,
    logical_cpus,
    prepared_torch,
    process,
    tf_cluster,
    torchrun,
    xla_devices,
)
from choros.bench.report import ReportRow, Table, compare, grouped
from choros.bench.run import RunResult
from choros.errors import ConfigError
from choros.frameworks import is_installed


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

_NOTES = (
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


def rows(
    bench: str,
    result: RunResult[TrainCase],
    framework: str,
    ranks: int,
    peers: Mapping[str, tuple[str, int]] = {},
) -> list[ReportRow]:
    """Returns the rows of ``result``, with the images per second of the best round; ``peers``: contenders that have
    another name and number of ranks.
    """
    made = []
    for (case, name), summary in result.summaries.items():
        peer, number = peers.get(name, (name, ranks))
        speed = case.batch * number / summary.best_s
        facts = {"framework": framework, **asdict(case), "images_per_s": speed}
        made.append(ReportRow(bench, peer, number, summary, facts))
    return made


def sections(measured: Sequence[ReportRow]) -> list[tuple[str, list[ReportRow]]]:
    """Groups the rows of the same framework, model and batch size under a label."""
    return grouped(measured, lambda row: "{framework}, {model}, {batch} a rank".format_map(row.facts))


def table(title: str, measured: Sequence[tuple[str, Sequence[ReportRow]]]) -> Table:
    """Returns the table of the sections that ``sections`` returned."""
    return compare(title, measured, throughput=True, notes=_NOTES)
