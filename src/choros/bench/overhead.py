"""``choros bench overhead``: its contenders, cases, rows and tables."""

from __future__ import annotations

from collections.abc import Sequence

from choros.bench.cases import PARTS, PartCase, TrainCase
from choros.bench.contender import CHOROS, Contender
from choros.bench.figures import Ratios, Summary, format_seconds, ratios
from choros.bench.report import ReportRow, Table
from choros.bench.run import RunResult
from choros.bench.start import chorosrun, elastic, one_core
from choros.bench.train import sections

__all__ = ["CONTENDERS", "PARTS_CONTENDERS", "PART_CASES", "part_rows", "rows", "tables"]

PLAIN = "plain Keras"
ELASTIC = "choros, elastic"
AGAIN = "choros, again"

CONTENDERS = (
    Contender(CHOROS, chorosrun, "train_choros"),
    Contender(ELASTIC, elastic, "train_choros"),
    Contender(AGAIN, chorosrun, "train_choros"),
    Contender("choros, 1 rank", one_core, "train_choros", single=True),
    Contender(PLAIN, one_core, "train_plain", single=True),
    Contender("plain Keras, twice", chorosrun, "train_plain"),
)
PARTS_CONTENDERS = (Contender(CHOROS, chorosrun, "parts"), Contender(ELASTIC, elastic, "parts"))
PART_CASES = tuple(PartCase(part) for part in PARTS)

#: The peer and the number of ranks in the rows of each contender.
_ROWS = {
    CHOROS: (CHOROS, 2),
    ELASTIC: (ELASTIC, 2),
    AGAIN: (AGAIN, 2),
    "choros, 1 rank": (CHOROS, 1),
    PLAIN: (PLAIN, 1),
    "plain Keras, twice": (PLAIN, 2),
}


def rows(result: RunResult[TrainCase], framework: str) -> list[ReportRow]:
    """Returns the rows of ``result``, measured with ``framework``."""
    made = []
    for (case, name), summary in result.summaries.items():
        peer, ranks = _ROWS[name]
        facts = {"framework": framework, **case.facts, "images_per_s": case.batch * ranks / summary.best_s}
        made.append(ReportRow("overhead", peer, ranks, summary, facts))
    return made


def part_rows(result: RunResult[PartCase]) -> list[ReportRow]:
    """Returns the rows of the parts of a step on two ranks."""
    return [ReportRow("overhead", name, 2, summary, case.facts) for (case, name), summary in result.summaries.items()]


def tables(measured: Sequence[ReportRow]) -> list[Table]:
    """Returns the table of training steps, with derived ratios as notes, and the table of the parts of a step."""
    steps = sections([row for row in measured if "framework" in row.facts])
    columns = ("", "images/s", "best", "median", "CPU")
    training = Table(
        "training step, 1 and 2 ranks",
        columns,
        tuple((label, tuple(map(_cells, section))) for label, section in steps),
        tuple(note for label, section in steps for note in _notes(label, section)),
    )
    title, labels = "communication, 2 ranks", {CHOROS: "the CNN's gradients", ELASTIC: "in an elastic job"}
    parts = tuple((label, lines) for peer, label in labels.items() if (lines := _part_lines(measured, peer)))
    return [training, Table(title, ("", "best", "median", "CPU"), parts)]


def _part_lines(measured: Sequence[ReportRow], peer: str) -> tuple[tuple[str, ...], ...]:
    rows = [row for row in measured if "part" in row.facts and row.peer == peer]
    return tuple((row.facts["part"], *_times(row.summary)) for row in rows)


def _cells(row: ReportRow) -> tuple[str, ...]:
    name = f"{row.peer}, {row.ranks} rank{'s' if row.ranks > 1 else ''}"
    return name, f"{row.facts['images_per_s']:,.0f}", *_times(row.summary)


def _times(summary: Summary) -> tuple[str, str, str]:
    return format_seconds(summary.best_s), format_seconds(summary.median_s), format_seconds(summary.cpu_s)


def _notes(label: str, section: Sequence[ReportRow]) -> list[str]:
    found = {(row.peer, row.ranks): row.summary for row in section}
    comparisons = (
        ("time of choros, 1 rank / plain Keras", (CHOROS, 1), (PLAIN, 1), 1),
        ("speed of choros, 2 ranks / 1 rank", (CHOROS, 1), (CHOROS, 2), 2),
        ("time of an elastic job / another one, 2 ranks", (ELASTIC, 2), (CHOROS, 2), 1),
        ("what two jobs that are the same differ by", (AGAIN, 2), (CHOROS, 2), 1),
        ("what the machine allows: plain Keras, twice / once", (PLAIN, 1), (PLAIN, 2), 2),
    )
    return [
        f"{label}: {what}: {_text(ratios(found[above], found[below]), factor)}"
        for what, above, below, factor in comparisons
        if above in found and below in found
    ]


def _text(relative: Ratios, factor: int) -> str:
    return f"best {relative.best * factor:.3f}, median {relative.median * factor:.3f}, CPU {relative.cpu * factor:.3f}"
