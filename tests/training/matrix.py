"""The transparency matrix: how far training on several ranks is from plain Keras in one process.

A *cell* is a combination of values, one of each dimension. The suite checks a selection of one framework's cells, in
which every pair of values of two dimensions occurs.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

__all__ = ["BOUND", "CELLS", "DIMENSIONS", "LEFT_OUT", "MEANING", "Cell", "Difference", "covering"]

#: The largest difference of a cell.
BOUND = 1e-4


class Difference(NamedTuple):
    """How far several ranks are from one process: relative to the largest value of a weight, and of the history."""

    weights: float
    history: float


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    framework: str
    way: str
    loss: str
    optimizer: str
    micro_batches: int
    last_batch: str

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


DIMENSIONS: dict[str, tuple[object, ...]] = {
    "framework": ("tensorflow", "torch", "jax"),
    "way": ("fit", "train_step", "loop"),
    "loss": ("mean", "sum", "weighted mean", "masked", "two outputs", "added", "LoRA"),
    "optimizer": ("SGD", "momentum, clipnorm", "Adam, global_clipnorm", "AdamW, EMA"),
    "micro_batches": (1, 2, 3),
    "last_batch": ("even", "uneven", "one row"),
}
#: What a value of the dimensions stands for, where it does not say so itself.
MEANING = {
    "mean": "squared errors, divided by the number of values (`sum_over_batch_size`)",
    "sum": '`reduction="sum"`',
    "weighted mean": '`reduction="mean_with_sample_weight"`, with sample weights from 0.1 to 3',
    "masked": "sequences of different lengths and `Embedding(mask_zero=True)`",
    "two outputs": "the sum of squared errors of one, the mean of absolute errors of the other, and `loss_weights`",
    "added": "the mean, L2 regularisation and `add_loss`",
    "LoRA": "the mean; of twelve variables three are trained: those of a layer with `lora_rank=2` behind frozen ones",
    "even, uneven, one row": "the last batch of 36, 33 and 25 rows in batches of 12; of the last, one rank has a row",
    "fit, train_step, loop": "under `MirroredStrategy`: `fit`, `fit` with one's own `train_step`, and `strategy.run`",
    "optimizers": "SGD; SGD with momentum and `clipnorm`; Adam with `global_clipnorm`; AdamW with `use_ema`",
    "accumulation": "`gradient_accumulation_steps` of 1, 2 and 3",
}
#: What the matrix leaves out, with the reason.
LEFT_OUT = {
    "loops with *weighted mean*, *masked*, *two outputs* and *added*": "there the program itself divides by the global "
    "batch",
    "loops with several micro-batches on JAX": "outside of a compiled function JAX compiles every accumulating step "
    "anew; `tests/distribute/custom_loop_cases.py` compares them",
    "`choros.keras`": "its optimizer and its weights of losses are the same code; `tests/keras_face/test_training.py` "
    "and `tests/training/test_losses.py` compare it",
    "losses that are ratios of sums over the rows, as `Dice` is by default": "each rank has those of its rows; see "
    "[training.md](training.md)",
    "batch normalisation": "plain, it normalises a replica's own rows, as in Horovod and tf.distribute; "
    "`tests/training/test_normalization.py` compares it with `synchronized=True`",
    "dropout and other random layers": "replicas draw other numbers than one process; see "
    "`tests/distribute/drift_cases.py`",
    "sparse gradients": "only TensorFlow has them; `tests/keras_face/sparse_cases.py` compares them",
    "mixed precision": "rounding alone exceeds the bound; `tests/keras_face/training_cases.py` checks overflows",
}


def _applies(cell: Cell) -> bool:
    if cell.way != "loop":
        return True
    return cell.loss in ("mean", "sum", "LoRA") and not (cell.framework == "jax" and cell.micro_batches > 1)


#: Those with the same model come one after the other.
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
