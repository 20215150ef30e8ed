"""``choros bench train``: the contenders of each framework, and what is made of their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from choros.bench.cases import MODELS, TrainCase
from choros.bench.contender import CHOROS, Contender
from choros.bench.report import Row, Table, compare
from choros.bench.run import Outcome
from choros.bench.start import chorosrun, horovodrun, jax_cluster, logical_cpus, tf_cluster, torchrun, xla_devices
from choros.errors import ConfigError

__all__ = ["CONTENDERS", "cases", "frameworks", "of", "rows", "sections", "table"]


def of(framework: str, *contenders: Contender) -> tuple[Contender, ...]:
    """The contenders, set to use ``framework``, which they all need."""
    environ = {"KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return tuple(replace(each, environ=environ, needs=[framework, "keras", *each.needs]) for each in contenders)


CONTENDERS = {
    "tensorflow": of(
        "tensorflow",
        Contender(CHOROS, chorosrun, "train_choros"),
        Contender("MirroredStrategy", logical_cpus, "train_mirrored", single=True),
        Contender("MultiWorkerMirroredStrategy", tf_cluster, "train_multi_worker"),
    ),
    "torch": of(
        "torch",
        Contender(CHOROS, chorosrun, "train_torch", ["choros"]),
        Contender("choros, by Keras", chorosrun, "train_choros"),
        Contender("torch DDP", torchrun, "train_torch", ["ddp"]),
        Contender("Horovod", horovodrun, "train_torch", ["horovod"], needs=["horovod"]),
    ),
    "jax": of(
        "jax",
        Contender(CHOROS, chorosrun, "train_choros"),
        Contender("keras.distribution (processes)", jax_cluster, "train_keras_distribution"),
        Contender("keras.distribution (devices)", xla_devices, "train_keras_distribution", single=True),
    ),
}

_NOTES = (
    "÷: the contender's time divided by choros'; above 1, choros takes less. CPU: of all ranks, for one step.",
    "cnn: the CNN of examples/mnist_horovod.py, 1.2 million parameters, Adam. mlp: 20 million parameters, SGD.",
    "On torch all train by a loop in plain PyTorch, but for one row; elsewhere by Keras' fit, but for",
    "MultiWorkerMirroredStrategy, whose fit fails under Keras 3.",
)


def frameworks(wanted: str, installed: Sequence[str]) -> tuple[str, ...]:
    """The frameworks to train on.

    Args:
        wanted: one, or ``all``, which is all that are installed.
        installed: those that are.

    Raises:
        ConfigError: it is not installed, or none is.
    """
    chosen = tuple(installed) if wanted == "all" else (wanted,)
    missing = [framework for framework in chosen if framework not in installed]
    if missing or not chosen:
        names = " or ".join(f"'choros[{framework}]'" for framework in missing or CONTENDERS)
        raise ConfigError(f"--framework {wanted}: not installed. Install it with: pip install {names}")
    return chosen


def cases(wanted: str, batch: int | None) -> list[TrainCase]:
    """The models to train: one, or ``all``, with ``batch`` examples a rank or what is usual for it.

    Example:
        >>> [str(case) for case in cases("all", None)]
        ['cnn, 128 a rank', 'mlp, 32 a rank']
    """
    chosen = MODELS if wanted == "all" else [wanted]
    return [TrainCase(name, batch or MODELS[name].batch) for name in chosen]


def rows(outcome: Outcome[TrainCase], ranks: int, framework: str) -> list[Row]:
    """What was measured with ``framework``."""
    made = []
    for (case, name), summary in outcome.summaries.items():
        facts = {"framework": framework, **case.facts, "images_per_s": case.batch * ranks / summary.best_s}
        made.append(Row("train", name, ranks, summary, facts))
    return made


def sections(measured: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows that did the same work, under a label."""
    found: dict[str, list[Row]] = {}
    for row in measured:
        label = "{framework}, {model}, {batch} a rank".format_map(row.facts)
        found.setdefault(label, []).append(row)
    return list(found.items())


def table(title: str, measured: Sequence[tuple[str, Sequence[Row]]]) -> Table:
    """The table of what ``sections`` gives."""
    return compare(title, measured, throughput=True, notes=_NOTES)
