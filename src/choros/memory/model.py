"""The memory of a rank, for any number of ranks, pure. Adam in float32, bytes a parameter::

                      weights  gradients  optimizer state     together
without shard_state      4         4             8               16
with, on n ranks         4         4            8/n           8 + 8/n
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from choros.errors import ConfigError
from choros.parallel.reduce.slices import whole_slices

#: How ``shard_state`` divides an optimizer's state: by items of variables, by whole variables, or not at all.
BY_ITEMS, BY_VARIABLES, UNDIVIDED = "items", "variables", ""
_UNITS = {f"{prefix}{end}": 10 ** (3 * power) for power, prefix in enumerate("kmgt", 1) for end in ("", "b")}
_UNITS |= {"b": 1, **{f"{prefix}ib": 1 << (10 * power) for power, prefix in enumerate("kmgt", 1)}}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
#: The bytes of the rank that needs most of a number of ranks, as the JSON file has them (docs/memory.md).
Need = Mapping[str, Any]


@dataclass(frozen=True)
class VariableBytes:
    """A trainable variable: its items, its bytes, which are those of its gradient too, and those of its state."""

    items: int
    nbytes: int
    state: int


@dataclass(frozen=True)
class TrainedModel:
    """What one process trains.

    Attributes:
        optimizer: the name of its class.
        variables: the trainable ones.
        division: how ``shard_state`` divides the state.
        shared_state: bytes of state that belong to no variable, and so to every rank.
        buffers: bytes of weights that are not trained.
        activations: what a step needs besides, in bytes, for the batch of a rank; ``None`` if it was not measured.
        rest: what the process needs besides all of these: Python, the framework, data; ``None`` if not measured.
        assumed: whether the optimizer is Adam because a file had none.
    """

    optimizer: str
    variables: tuple[VariableBytes, ...]
    division: str
    shared_state: int = 0
    buffers: int = 0
    activations: int | None = None
    rest: int | None = None
    assumed: bool = False

    @property
    def parameters(self) -> int:
        """The number of trained numbers."""
        return sum(each.items for each in self.variables)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> TrainedModel:
        """Returns what ``dataclasses.asdict`` has made of one, and JSON of that."""
        return cls(**{**written, "variables": tuple(VariableBytes(**each) for each in written["variables"])})


def rank_bytes(model: TrainedModel, ranks: int, *, shard_state: bool) -> Need:
    """Returns what the rank that needs most needs, where each of ``ranks`` keeps the batch size of one process; without
    activations in the total if these are not known.

    >>> model = TrainedModel("Adam", (VariableBytes(100, 400, 800),), BY_ITEMS)
    >>> [rank_bytes(model, ranks, shard_state=True)["total"] for ranks in (1, 2, 4)]
    [1600, 1200, 1000]
    """
    weights = sum(each.nbytes for each in model.variables)
    state = model.shared_state + _state(model, ranks if shard_state else 1)
    parts = {"weights": weights, "gradients": weights, "state": state, "buffers": model.buffers}
    total = sum(parts.values()) + (model.activations or 0)
    about = {"ranks": ranks, "shard_state": shard_state}
    return {**about, **parts, "activations": model.activations, "total": total}


def _state(model: TrainedModel, ranks: int) -> int:
    states = [each.state for each in model.variables]
    if model.division == BY_ITEMS:
        return -(-sum(states) // ranks)
    if model.division == UNDIVIDED or not states:
        return sum(states)
    ranks = min(ranks, len(states))  # more have nothing
    owners = whole_slices([each.items for each in model.variables], ranks)
    return max(
        sum(state for state, ranges in zip(states, owners, strict=True) if ranges[rank][1]) for rank in range(ranks)
    )


def first_fit(needs: Iterable[Need], limit: int) -> int | None:
    """Returns the smallest number of ranks whose ``needs`` are at most ``limit`` bytes; ``None`` if there is none."""
    return min((each["ranks"] for each in needs if each["total"] <= limit), default=None)


def parse_memory(text: str) -> int:
    """Parses the size of ``--fit`` into bytes, or raises a ``ConfigError``: GB, or G, are 10⁹ bytes, GiB 2³⁰.

    >>> parse_memory("24GB"), parse_memory("1.5 GiB"), parse_memory("80g")
    (24000000000, 1610612736, 80000000000)
    """
    match = _MEMORY.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size == 0:
        raise ConfigError(f"--fit {text}: expected a size of memory, such as 24GB, 24GiB or 80G.")
    return size
