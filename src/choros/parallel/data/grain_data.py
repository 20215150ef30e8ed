"""Batches of Grain data sets."""

from __future__ import annotations

from typing import Any

from choros.errors import ConfigError
from choros.parallel.data.part import Part, count_rows

__all__ = ["refuse_loader", "split"]


def split(batches: Any, part: Part) -> Any:
    """The process's rows of each batch of a ``MapDataset`` or ``IterDataset``, without batches in which it has none."""
    import grain

    parts = batches.map(part.of)
    if not isinstance(batches, grain.MapDataset):
        return parts.filter(lambda rows: count_rows(rows) > 0)
    # Only the last batch can be too small to have a row for everybody.
    number = len(batches)
    return parts[: number - 1] if number and count_rows(parts[number - 1]) == 0 else parts


def refuse_loader(data: Any) -> None:
    """A ``ConfigError`` if ``data`` is a ``grain.DataLoader``, which nobody but its own sampler can split."""
    import grain

    if isinstance(data, grain.DataLoader):
        raise ConfigError(
            "a grain.DataLoader is split by its sampler: pass it shard_options=grain.sharding.ShardOptions("
            "shard_index=…, shard_count=…) with this process's rank and the size. Or take a grain.MapDataset."
        )
