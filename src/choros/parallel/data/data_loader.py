"""Batches of a torch ``DataLoader``, of which only the process's own examples are loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, final

from choros.errors import ConfigError
from choros.parallel.data.kind import DataKind, LocalBatches, Sharding
from choros.parallel.data.part import Part, check_global_batch, checked, count_rows, cut

__all__ = ["KIND", "DataLoaderKind"]


@final
class DataLoaderKind(DataKind):
    """``torch.utils.data.DataLoader``: its batches are the global ones, of which the process loads its own examples."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """A ``DataLoader`` of the process's rows, of batches of another size if one is given."""
        return _split(data, sharding.part, batch_size=sharding.batch_size, seed=sharding.seed)

    def split(self, data: Any, part: Part) -> Any:
        """A ``DataLoader`` of the process's rows."""
        if data.batch_size is not None:
            check_global_batch(data.batch_size, part.count)
        return _split(data, part)

    def local_batches(self, data: Any, part: Part) -> LocalBatches:
        """Of a stream every process loads everything."""
        if _is_stream(data):
            return super().local_batches(data, part)
        loaded = _LoadedParts(data, part)
        return LocalBatches(lambda: iter(loaded), lambda: self.length(data))

    def batch_rows(self, data: Any) -> int | None:
        """The loader's ``batch_size``."""
        rows: int | None = data.batch_size
        return rows


def _is_stream(loader: Any) -> bool:
    """Whether its examples come in an order of their own, and cannot be chosen."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _split(loader: Any, part: Part, *, batch_size: int | None = None, seed: int = 0) -> Any:
    """A ``DataLoader`` of the process's rows of each batch, without batches in which it has none.

    Args:
        loader: its batches are the global ones.
        part: which rows are the process's.
        batch_size: examples in a global batch, if not those of the loader.
        seed: of random samplers that have no generator.

    Raises:
        ConfigError: the loader makes no batches, or a stream others than ``batch_size`` asks for.
    """
    import torch.utils.data as torch_data

    if _is_stream(loader):
        if batch_size is not None and batch_size != loader.batch_size:
            raise ConfigError(
                f"the DataLoader reads a stream in batches of {loader.batch_size}, batch_size={batch_size} asks for "
                "others. Its batches are the global ones: make them that large, or leave batch_size out."
            )
        return torch_data.DataLoader(_stream_part(loader, part), batch_size=None)
    return _with_sampler(loader, _sampler_part(loader, part, batch_size, seed, deque(), keep_empty=False))


@final
class _LoadedParts:
    """The process's rows of each batch of a ``DataLoader`` that is no stream, with batches of no rows among them.

    Args:
        loader: its batches are the global ones.
        part: which rows are the process's.
    """

    def __init__(self, loader: Any, part: Part) -> None:
        if loader.batch_size is not None:
            check_global_batch(loader.batch_size, part.count)
        self._rows: deque[int] = deque()
        self._loader = _with_sampler(loader, _sampler_part(loader, part, None, 0, self._rows, keep_empty=True))

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch if self._rows.popleft() else cut(batch, 0, 0)


def _with_sampler(loader: Any, sampler: Any) -> Any:
    import torch.utils.data as torch_data

    shared = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    }
    if loader.num_workers:
        shared.update(prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers)
    return torch_data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn, **shared)


def _sampler_part(
    loader: Any, part: Part, batch_size: int | None, seed: int, rows: deque[int], *, keep_empty: bool
) -> Any:
    """The process's indices of each global batch; their numbers are appended to ``rows``, batch by batch.

    With ``keep_empty`` a batch of which it gets none is its first example, as nothing can be collated from nothing.
    """
    import torch.utils.data as torch_data

    sampler = loader.batch_sampler
    if batch_size is not None:
        sampler = torch_data.BatchSampler(loader.sampler, batch_size, drop_last=loader.drop_last)
    if sampler is None:
        raise ConfigError(
            "the DataLoader yields single examples (batch_size=None): give it the size of a global batch."
        )
    if isinstance(loader.sampler, torch_data.DistributedSampler):
        raise ConfigError(
            "the DataLoader has a DistributedSampler, which deals out examples to processes itself: leave it out, the "
            "whole data set is dealt out here."
        )
    _seed_sampler(loader.sampler, seed)

    class PartSampler(torch_data.Sampler):
        def __len__(self) -> int:
            return len(sampler)

        def __iter__(self) -> Iterator[list[int]]:
            rows.clear()
            for indices in checked(sampler, part.count, len) if keep_empty else sampler:
                start, end = part.range(len(indices))
                if end > start or keep_empty:
                    rows.append(end - start)
                    yield indices[start:end] or indices[:1]

    return PartSampler()


def _seed_sampler(sampler: Any, seed: int) -> None:
    """Ranks must draw the same order to split it."""
    import torch

    if hasattr(sampler, "generator") and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)


def _stream_part(loader: Any, part: Part) -> Any:
    import torch.utils.data as torch_data

    class StreamPart(torch_data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            for batch in loader:
                rows = part.of(batch)
                if count_rows(rows) > 0:
                    yield rows

    return StreamPart()


KIND = DataLoaderKind()
