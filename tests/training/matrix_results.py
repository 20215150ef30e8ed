"""The results of the transparency matrix: a file for each framework and number of ranks, and the page made of them."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from training.matrix import BOUND, CELLS, DIMENSIONS, LEFT_OUT, MEANING, Cell, Difference, covering

__all__ = ["LIBRARIES", "PAGE", "PARTS", "Part", "Results", "page"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "transparency.md"
LIBRARIES = {"tensorflow": "TensorFlow", "torch": "PyTorch", "jax": "JAX"}


@dataclass(frozen=True)
class Part:
    """The cells of one framework, on this many ranks; with the optimizer's state in slices a selection of them."""

    framework: str
    ranks: int
    in_slices: bool = False

    @property
    def cells(self) -> tuple[Cell, ...]:
        """In the order in which models are used again."""
        cells = tuple(cell for cell in CELLS if cell.framework == self.framework)
        return tuple(covering(cells)) if self.in_slices else cells

    @property
    def file(self) -> Path:
        """Has a line for each cell that has been compared."""
        return DOCS / "transparency" / f"{self.framework}-{self.ranks}{'-slices' if self.in_slices else ''}.csv"


PARTS = tuple(itertools.starmap(Part, itertools.product(LIBRARIES, (2, 3), (False, True))))


@dataclass(frozen=True)
class Results:
    """The differences of the cells of a part that have been compared, with these versions of the libraries."""

    versions: str
    differences: Mapping[Cell, Difference]

    @classmethod
    def read(cls, part: Part) -> Results:
        """Reads the part's file; none is no results."""
        if not part.file.exists():
            return cls("", {})
        cells = {str(cell): cell for cell in part.cells}
        with part.file.open(newline="") as file:
            versions = file.readline().removeprefix("# ").rstrip("\n")
            _, *rows = csv.reader(file)
        width = len(Difference._fields)
        found = {"-".join((part.framework, *row[:-width])): Difference(*map(float, row[-width:])) for row in rows}
        return cls(versions, {cells[name]: difference for name, difference in found.items()})

    def missing(self, part: Part) -> list[Cell]:
        """Returns the cells of the part that have not been compared, those with new pairs of values first."""
        return [cell for cell in dict.fromkeys([*covering(part.cells), *part.cells]) if cell not in self.differences]

    def write(self, part: Part) -> None:
        """Writes the part's file, at once."""
        unfinished = part.file.with_suffix(".unfinished")
        unfinished.parent.mkdir(exist_ok=True)
        names = [field.name for field in fields(Cell) if field.name != "framework"]
        with unfinished.open("w", newline="") as file:
            file.write(f"# {self.versions}\n")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*names, *Difference._fields])
            for cell in sorted(self.differences, key=CELLS.index):
                numbers = [f"{value:.1e}" for value in self.differences[cell]]
                writer.writerow([*(getattr(cell, name) for name in names), *numbers])
        os.replace(unfinished, part.file)


def page(results: Mapping[Part, Results]) -> str:
    """Returns the page, in Markdown."""
    numbers = sorted({part.ranks for part in results})
    ways = list(itertools.product(numbers, ("", ", in slices"), Difference._fields))
    sections = [
        INTRODUCTION.format(
            number=sum(len(each.differences) for part, each in results.items() if not part.in_slices),
            in_slices=sum(len(each.differences) for part, each in results.items() if part.in_slices),
        ),
        *_table(["", *(f"{ranks} ranks, {name}{state}" for ranks, state, name in ways)], _largest(results)),
        *itertools.chain.from_iterable(_section(results, ranks) for ranks in numbers),
        "\n## What is compared\n",
        *(f"- *{name}*: {text}" for name, text in MEANING.items()),
        "\n## What is left out\n",
        *(f"- {what}: {why}" for what, why in LEFT_OUT.items()),
        *_not_compared(results),
        "\n## Versions\n",
        *(f"- {versions}" for versions in dict.fromkeys(each.versions for each in results.values())),
        "\nThe files of the folder `docs/transparency` have the differences of each combination.\n",
    ]
    return "\n".join(sections)


def _largest(results: Mapping[Part, Results]) -> list[list[str]]:
    rows = {library: [library] for library in LIBRARIES.values()}
    for part, each in results.items():
        rows[LIBRARIES[part.framework]] += [_short(column) for column in zip(*each.differences.values(), strict=True)]
    return list(rows.values())


def _section(results: Mapping[Part, Results], ranks: int) -> list[str]:
    columns = list(itertools.product(LIBRARIES, DIMENSIONS["way"]))
    rows = []
    for loss, last_batch in itertools.product(DIMENSIONS["loss"], DIMENSIONS["last_batch"]):
        row = [str(loss), str(last_batch)]
        for framework, way in columns:
            differences = results[Part(framework, ranks)].differences
            cells = [cell for cell in differences if (cell.loss, cell.last_batch, cell.way) == (loss, last_batch, way)]
            row.append(_short(itertools.chain.from_iterable(differences[cell] for cell in cells)))
        rows.append(row)
    heads = ["loss", "last batch", *(f"{LIBRARIES[framework]}: {way}" for framework, way in columns)]
    text = "Of the weights and the history, the larger one; over all optimizers and numbers of micro-batches."
    return [f"\n## {ranks} ranks\n\n{text}\n", *_table(heads, rows)]


def _not_compared(results: Mapping[Part, Results]) -> Iterator[str]:
    for part, each in results.items():
        if missing := len(each.missing(part)):
            cells = (
                f"{missing} of {len(part.cells)} combinations on {part.ranks} ranks with {LIBRARIES[part.framework]}"
            )
            yield f"- {cells}: in the others, every two values occur together"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _short(values: Iterable[float]) -> str:
    """The largest value, as in ``1.2e-7``; without any, a dash."""
    largest = max(values, default=None)
    if largest is None:
        return "–"
    mantissa, _, exponent = f"{largest:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if largest else "0"


INTRODUCTION = f"""\
# The transparency matrix

How far training on several ranks is from one process of plain Keras. A number is the largest absolute difference of a
weight's values, or of the values of the history (losses and metrics of all epochs, or of the steps of a loop), divided
by the largest absolute value of that weight, or of the history. The bound is {_short([BOUND])}, in each of {{number}}
combinations; and in {{in_slices}} with the optimizer's state [in slices](shard-state.md), in which every two values
occur together.

`make matrix` compares them and writes this page; the test suite compares a selection of those on PyTorch, in which
every two values occur together.
"""
