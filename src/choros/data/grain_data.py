"""Batches of Grain data sets. The module imports Grain: import it on demand."""

from collections.abc import Callable
from typing import Any, final

import grain

from choros.data.epochs import EpochData, IndexedData, StreamData
from choros.data.kinds import DataKind
from choros.data.rows import Part, Sharding, count_rows, example_indices, note_rows
from choros.errors import ConfigError


@final
class GrainKind(DataKind):
    """Grain's ``MapDataset`` and ``IterDataset``; its ``DataLoader`` is an error."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a data set of this process's rows; of a ``MapDataset``, only those examples are read."""
        _reject_loader(data)
        part, batch_size = sharding.part, sharding.batch_size
        if isinstance(data, grain.MapDataset):
            if batch_size is None:
                start, end = part.range(len(data))
                return data[start:end]
            start, end = part.range(batch_size)
            indices = example_indices(len(data), batch_size, part)
            return grain.MapDataset.source(indices).map(lambda index: data[int(index)]).batch(end - start)
        if batch_size is None:
            raise ConfigError("a grain.IterDataset is sharded batch by batch: pass shard(…, batch_size=…).")
        return _split(data.batch(batch_size), part).filter(lambda rows: count_rows(rows) > 0)

    def split(self, data: Any, part: Part) -> Any:
        """Returns a data set of the process's rows."""
        _reject_loader(data)
        return _split(data, part)

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of the data set, which all have the same order, as in Keras."""
        _reject_loader(data)
        batches = data if sharding.batch_size is None else data.batch(sharding.batch_size)
        _note(batches)
        if not isinstance(data, grain.MapDataset):
            return StreamData(sharding, _iterated, lambda _: batches)

        def rows(part: Part, index: int, _: int) -> Any:
            return part.of(batches[index])

        return IndexedData(sharding, _iterated, lambda: len(batches), rows)

    def local_batches(self, data: Any, part: Callable[[], Part]) -> Any:
        """Returns the process's rows of each batch, as for any iterable."""
        _reject_loader(data)
        return super().local_batches(data, part)


def _split(batches: Any, part: Part) -> Any:
    """The process's rows of each batch; the last batch of a ``MapDataset`` only if it has any."""
    _note(batches)
    parts, number = batches.map(part.of), len(batches) if isinstance(batches, grain.MapDataset) else 0
    return parts[: number - 1] if number and count_rows(parts[number - 1]) == 0 else parts


def _note(batches: Any) -> None:
    note_rows(next(iter(batches), None))


def _reject_loader(data: Any) -> None:
    """Raises a ``ConfigError`` if ``data`` is a ``grain.DataLoader``, which only its own sampler can shard."""
    if isinstance(data, grain.DataLoader):
        raise ConfigError(
            "a grain.DataLoader is sharded by its sampler: pass it shard_options=grain.sharding.ShardOptions("
            "shard_index=…, shard_count=…) with this process's rank and the size. Or use a grain.MapDataset."
        )


def _iterated(source: EpochData) -> Any:
    """Returns the batches of the current parts of ``source`` as an ``IterDataset``."""

    class Batches(grain.DatasetIterator):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self._batches = source.batches(source.parts, source.epoch)

        def __next__(self) -> Any:
            return next(self._batches)

        def get_state(self) -> Any:
            raise NotImplementedError

        def set_state(self, state: Any) -> None:
            raise NotImplementedError

    class Iterated(grain.IterDataset):  # type: ignore[misc, unused-ignore]
        def __iter__(self) -> Batches:
            return Batches()

    return Iterated()


KIND = GrainKind()
