"""The table and the JSON file of ``choros memory``."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from choros.bench.cases import format_bytes
from choros.bench.figures import format_ranks
from choros.bench.report import Table
from choros.memory.model import BY_VARIABLES, UNDIVIDED, RankBytes, TrainedModel, first_fit, rank_bytes

_UNKNOWN = "–"


@dataclass(frozen=True)
class MemoryOutlook:
    """What each rank needs on these numbers of ranks.

    Attributes:
        title: what was inspected.
        model: what it trains.
        numbers: numbers of ranks.
        fit, limit: the memory of a rank, if it was given, and in bytes.
    """

    title: str
    model: TrainedModel
    numbers: Sequence[int]
    fit: str = ""
    limit: int | None = None

    def needs(self, *, shard_state: bool) -> list[RankBytes]:
        """The bytes of a rank on each number of ranks."""
        return [rank_bytes(self.model, ranks, shard_state=shard_state) for ranks in self.numbers]

    def as_json(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        ways = {False: self.needs(shard_state=False), True: self.needs(shard_state=True)}
        limit = {} if self.limit is None else {
            "limit": self.limit,
            "first_that_fits": {
                "without_shard_state": first_fit(ways[False], self.limit),
                "with_shard_state": first_fit(ways[True], self.limit),
            },
        }  # fmt: skip
        return {
            "optimizer": self.model.optimizer,
            "assumed": self.model.assumed,
            "parameters": self.model.parameters,
            "rest": self.model.rest,
            **limit,
            "needs": [{**asdict(each), "total": each.total} for way in ways.values() for each in way],
        }

    def table(self) -> Table:
        """The table that is printed."""
        heads = ["", "weights", "gradients", "state", "buffers", "activations", "a rank"]
        heads += [f"fits {self.fit}"] if self.fit else []
        without = rank_bytes(self.model, self.numbers[0], shard_state=False)
        sections = [
            ("without shard_state", [self._cells("any number of ranks", without)]),
            (
                "with shard_state",
                [self._cells(format_ranks(each.ranks), each) for each in self.needs(shard_state=True)],
            ),
        ]
        return Table(self.title, heads, sections, self._notes())

    def _cells(self, name: str, need: RankBytes) -> list[str]:
        known = (need.weights, need.gradients, need.state, need.buffers)
        activations = _UNKNOWN if need.activations is None else format_bytes(need.activations)
        fits = [] if self.limit is None else ["yes" if need.total <= self.limit else "no"]
        return [name, *map(format_bytes, known), activations, format_bytes(need.total), *fits]

    def _notes(self) -> list[str]:
        model = self.model
        notes = ["The file has no optimizer: the state is that of Adam."] if model.assumed else []
        if model.division == UNDIVIDED:
            notes.append(f"shard_state does not divide the state of {model.optimizer}: each rank has all of it.")
        elif model.division == BY_VARIABLES:
            notes.append(f"{model.optimizer} needs whole variables: the state of each is on one rank.")
        if model.activations is None:
            notes.append(
                "activations were not measured, and are not in the sum: a script needs three steps, a file --batch N; "
                "on Linux, without an accelerator."
            )
        else:
            notes.append("activations: what a step needs besides, measured; each rank keeps the batch size of one.")
        if model.rest is not None:
            notes.append(f"Not in the sum: {format_bytes(model.rest)} of the process: Python, the framework, data.")
        return notes + ([] if self.limit is None else [self._verdict(self.limit)])

    def _verdict(self, limit: int) -> str:
        """Which number of ranks is the first that fits."""
        whole, sliced = (first_fit(self.needs(shard_state=way), limit) for way in (False, True))
        if whole is not None:
            return f"It fits {self.fit} without shard_state, on any number of ranks."
        if sliced is not None:
            return f"It fits {self.fit} with shard_state from {format_ranks(sliced)} on; never without."
        return f"It does not fit {self.fit} on any of these numbers of ranks."
