"""Batches of Grain data sets."""

from __future__ import annotations

from typing import Any, final

from choros.errors import ConfigError
from choros.parallel.data.kind import DataKind, LocalBatches, Sharding
from choros.parallel.data.part import Part, count_rows
from choros.parallel.data.shard import example_indices
from choros.topology import shard_range

__all__ = ["KIND", "GrainKind"]


@final
class GrainKind(DataKind):
    """Grain's ``MapDataset`` and ``IterDataset``; its ``DataLoader`` is an error."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a data set of this process's rows; of a ``MapDataset``, only those examples are read."""
        import grain

        _reject_loader(data)
        part, batch_size = sharding.part, sharding.batch_size
        if isinstance(data, grain.MapDataset):
            if batch_size is None:
                start, end = part.range(len(data))
                return data[start:end]
            full_start, full_end = shard_range(batch_size, part.first, part.count)
            indices = example_indices(len(data), batch_size, part.first, part.count)
            return grain.MapDataset.source(_Subset(data, indices)).batch(full_end - full_start)
        if batch_size is None:
            raise ConfigError("a grain.IterDataset is sharded batch by batch: pass shard(…, batch_size=…).")
        return _split(data.batch(batch_size), part).filter(lambda rows: count_rows(rows) > 0)

    def split(self, data: Any, part: Part) -> Any:
        """Returns a data set of the process's rows."""
        _reject_loader(data)
        return _split(data, part)

    def local_batches(self, data: Any, part: Part) -> LocalBatches:
        """Returns the process's rows of each batch, as for any iterable."""
        _reject_loader(data)
        return super().local_batches(data, part)


def _split(batches: Any, part: Part) -> Any:
    """The process's rows of each batch; the last batch of a ``MapDataset`` only if it has any."""
    import grain

    parts = batches.map(part.of)
    if not isinstance(batches, grain.MapDataset):
        return parts
    number = len(batches)
    return parts[: number - 1] if number and count_rows(parts[number - 1]) == 0 else parts


def _reject_loader(data: Any) -> None:
    """Raises a ``ConfigError`` if ``data`` is a ``grain.DataLoader``, which only its own sampler can shard."""
    import grain

    if isinstance(data, grain.DataLoader):
        raise ConfigError(
            "a grain.DataLoader is sharded by its sampler: pass it shard_options=grain.sharding.ShardOptions("
            "shard_index=…, shard_count=…) with this process's rank and the size. Or use a grain.MapDataset."
        )


@final
class _Subset:
    """The elements of a random-access data set at some indices."""

    def __init__(self, data: Any, indices: Any) -> None:
        self._data = data
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._indices[index])]


KIND = GrainKind()
