"""``choros bench train``: the contenders of each framework, the cases, rows and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from choros.bench.cases import MODELS, TrainCase
from choros.bench.contender import CHOROS, Contender
from choros.bench.report import ReportRow, Table, compare
from choros.bench.run import RunResult
from choros.bench.start import (
    chorosrun,
    horovodrun,
    jax_cluster,
    logical_cpus,
    prepared_torch,
    tf_cluster,
    torchrun,
    xla_devices,
)
from choros.errors import ConfigError

__all__ = ["CONTENDERS", "cases", "frameworks", "of", "rows", "sections", "table"]


def of(framework: str, *contenders: Contender) -> tuple[Contender, ...]:
    """Returns the contenders, configured for ``framework`` and requiring it."""
    environ = {"KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return tuple(replace(each, environ=environ, needs=[framework, "keras", *each.needs]) for each in contenders)


CONTENDERS = {
    "tensorflow": of(
        "tensorflow",
        Contender(CHOROS, chorosrun, "train_choros"),
        Contender("choros, by a tape", chorosrun, "train_tape"),
        Contender("MirroredStrategy", logical_cpus, "train_mirrored", single=True),
        Contender("MultiWorkerMirroredStrategy", tf_cluster, "train_multi_worker"),
    ),
    "torch": of(
        "torch",
        Contender(CHOROS, chorosrun, "train_torch", ["choros"]),
        Contender("choros, by Keras", chorosrun, "train_choros"),
        Contender("torch DDP", torchrun, "train_torch", ["ddp"]),
        Contender("torch DDP prepared", prepared_torch, "train_torch", ["ddp"]),
        Contender("Horovod", horovodrun, "train_torch", ["horovod"], needs=["horovod"]),
    ),
    "jax": of(
        "jax",
        Contender(CHOROS, chorosrun, "train_choros"),
        Contender("choros, by a loop", chorosrun, "train_jax", ["choros"], needs=["optax"]),
        Contender("jax.jit on a mesh", jax_cluster, "train_jax", ["mesh"], needs=["optax"]),
        Contender("keras.distribution (processes)", jax_cluster, "train_keras_distribution"),
        Contender("keras.distribution (devices)", xla_devices, "train_keras_distribution", single=True),
    ),
}

_NOTES = (
    "÷: the contender's time divided by choros'; above 1, choros takes less. CPU: of all ranks, for one step.",
    "cnn: the CNN of examples/mnist_horovod.py, 1.2 million parameters, Adam. mlp: 20 million parameters, SGD.",
    "torch: all but 'choros, by Keras' train in a plain PyTorch loop. Other frameworks: all train with Keras' fit but",
    "'choros, by a tape', 'choros, by a loop', 'jax.jit on a mesh', and MultiWorkerMirroredStrategy, whose fit fails",
    "under Keras 3; these train in custom loops.",
)


def frameworks(wanted: str, installed: Sequence[str]) -> tuple[str, ...]:
    """Returns the frameworks to train with.

    Args:
        wanted: one framework, or ``all`` for all that are installed.
        installed: the installed frameworks.

    Raises:
        ConfigError: the framework is not installed, or no framework is.
    """
    chosen = tuple(installed) if wanted == "all" else (wanted,)
    missing = [framework for framework in chosen if framework not in installed]
    if missing or not chosen:
        names = " or ".join(f"'choros[{framework}]'" for framework in missing or CONTENDERS)
        raise ConfigError(f"--framework {wanted}: not installed. Install it with: pip install {names}")
    return chosen


def cases(wanted: str, batch: int | None) -> list[TrainCase]:
    """Returns the models to train: one, or ``all``; each with ``batch`` examples per rank, or with its default.

    Example:
        >>> [str(case) for case in cases("all", None)]
        ['cnn, 128 a rank', 'mlp, 32 a rank']
    """
    chosen = MODELS if wanted == "all" else [wanted]
    return [TrainCase(name, batch or MODELS[name].batch) for name in chosen]


def rows(result: RunResult[TrainCase], ranks: int, framework: str) -> list[ReportRow]:
    """Returns the rows of ``result``, measured with ``framework``."""
    made = []
    for (case, name), summary in result.summaries.items():
        facts = {"framework": framework, **case.facts, "images_per_s": case.batch * ranks / summary.best_s}
        made.append(ReportRow("train", name, ranks, summary, facts))
    return made


def sections(measured: Sequence[ReportRow]) -> list[tuple[str, list[ReportRow]]]:
    """Groups the rows of the same framework, model and batch size under a label."""
    found: dict[str, list[ReportRow]] = {}
    for row in measured:
        label = "{framework}, {model}, {batch} a rank".format_map(row.facts)
        found.setdefault(label, []).append(row)
    return list(found.items())


def table(title: str, measured: Sequence[tuple[str, Sequence[ReportRow]]]) -> Table:
    """Returns the table of the sections that ``sections`` returned."""
    return compare(title, measured, throughput=True, notes=_NOTES)
