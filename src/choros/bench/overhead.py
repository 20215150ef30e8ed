"""``choros bench overhead``: its contenders, cases, rows and tables."""

from collections.abc import Sequence

from choros.bench.contender import CHOROS, Contender, chorosrun, elastic, one_core, process
from choros.bench.figures import format_ranks, ratios
from choros.bench.report import ReportRow, Table, grouped, seconds_of
from choros.bench.run import RunResult
from choros.bench.train import sections

PLAIN = "plain Keras"
ELASTIC = "choros, elastic"
AGAIN = "choros, again"

CONTENDERS = (
    Contender(CHOROS, chorosrun, process("keras_fit", "choros")),
    Contender(ELASTIC, elastic, process("keras_fit", "choros")),
    Contender(AGAIN, chorosrun, process("keras_fit", "choros")),
    Contender("choros, 1 rank", one_core, process("keras_fit", "choros"), single=True),
    Contender(PLAIN, one_core, process("keras_fit", "plain"), single=True),
    Contender("plain Keras, twice", chorosrun, process("keras_fit", "plain")),
)
PARTS_CONTENDERS = (
    Contender(CHOROS, chorosrun, process("allreduce", "parts")),
    Contender(ELASTIC, elastic, process("allreduce", "parts")),
)
#: The parts of the communication of a step of choros, with the CNN's gradients.
PARTS = ("control message", "pack", "allreduce", "unpack", "all, by the reducer")

#: The peer and the number of ranks in the rows of contenders where these are not their own name and 2.
PEERS = {
    "choros, 1 rank": (CHOROS, 1),
    PLAIN: (PLAIN, 1),
    "plain Keras, twice": (PLAIN, 2),
}


def part_rows(result: RunResult[str]) -> list[ReportRow]:
    """Returns the rows of the ``PARTS``, measured on two ranks."""
    return [
        ReportRow("overhead", name, 2, summary, {"part": part, "model": "cnn"})
        for (part, name), summary in result.summaries.items()
    ]


def tables(measured: Sequence[ReportRow]) -> list[Table]:
    """Returns the table of training steps, with derived ratios as notes, and the table of the parts of a step."""
    steps = sections([row for row in measured if "framework" in row.facts])
    columns = ("", "images/s", "best", "median", "CPU")
    training = Table(
        "training step, 1 and 2 ranks",
        columns,
        [(label, list(map(_cells, section))) for label, section in steps],
        [note for label, section in steps for note in _notes(label, section)],
    )
    labels = {CHOROS: "the CNN's gradients", ELASTIC: "in an elastic job"}
    parts = grouped([row for row in measured if "part" in row.facts], lambda row: labels[row.peer])
    lines = [(label, [(row.facts["part"], *seconds_of(row.summary)) for row in rows]) for label, rows in parts]
    return [training, Table("communication, 2 ranks", ("", "best", "median", "CPU"), lines)]


def _cells(row: ReportRow) -> tuple[str, ...]:
    return f"{row.peer}, {format_ranks(row.ranks)}", f"{row.facts['images_per_s']:,.0f}", *seconds_of(row.summary)


def _notes(label: str, section: Sequence[ReportRow]) -> list[str]:
    found = {(row.peer, row.ranks): row.summary for row in section}
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
