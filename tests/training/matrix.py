"""The transparency matrix: how far training on several ranks is from plain Keras in one process.

A *cell* is a combination of values, one of each dimension. The suite checks a selection in which every pair of values
of two dimensions occurs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import astuple, dataclass, fields

__all__ = ["CELLS", "DIMENSIONS", "LEFT_OUT", "Cell", "covering"]


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    loss: str
    optimizer: str
    micro_batches: int
    last_batch: str
    way: str
    framework: str

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


DIMENSIONS: dict[str, tuple[object, ...]] = {
    "loss": ("mean", "sum", "weighted mean", "masked", "two outputs", "added"),
    "optimizer": ("SGD", "momentum, clipnorm", "Adam, global_clipnorm", "AdamW, EMA"),
    "micro_batches": (1, 2, 3),
    "last_batch": ("even", "uneven", "one row"),
    "way": ("fit", "train_step", "loop"),
    "framework": ("tensorflow", "torch", "jax"),
}
#: What the matrix leaves out, with the reason.
LEFT_OUT = {
    "loop with weighted mean, masked, two outputs, added": "there the program divides by the global batch itself",
    "loop with several micro-batches on jax": "the program's own compiled function holds the accumulators",
}


def _applies(cell: Cell) -> bool:
    if cell.way != "loop":
        return True
    return cell.loss in ("mean", "sum") and not (cell.framework == "jax" and cell.micro_batches > 1)


CELLS = tuple(cell for values in itertools.product(*DIMENSIONS.values()) if _applies(cell := Cell(*values)))


@functools.cache
def covering(cells: tuple[Cell, ...]) -> list[Cell]:
    """Returns a selection in which every pair of values that occurs in ``cells`` occurs; greedy, always the same.

    Example:
        >>> {cell.way for cell in covering(CELLS)} == set(DIMENSIONS["way"])
        True
    """
    missing = set().union(*map(_pairs, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations([(field.name, getattr(cell, field.name)) for field in fields(cell)], 2))


if __name__ == "__main__":
    selection = covering(CELLS)
    sys.stdout.write(f"{len(CELLS)} cells, {len(selection)} in the selection\n")
