"""Batches of a torch ``DataLoader``; a process loads only its own examples. The module imports torch: on demand."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.utils.data as torch_data

from choros.data.epochs import EpochData, StreamData, counted
from choros.data.kinds import DataKind, LocalBatches
from choros.data.plan import ShardBatches
from choros.data.rows import Part, Sharding, check_global_batch, checked, count_rows, cut, without_last_empty
from choros.errors import ConfigError
from choros.observe.progress import page
from choros.parallel.objects import object_of_first


def time_data_loaders() -> None:
    """Times, for this rank's page, how long loops wait for the next batch of any ``DataLoader``, also Keras' own."""
    iterators = torch_data.dataloader._BaseDataLoaderIter
    read = iterators.__next__
    if not hasattr(read, "is_timed"):

        def timed(batches: Any) -> Any:
            with page.loading():
                return read(batches)

        timed.is_timed = True  # type: ignore[attr-defined]
        iterators.__next__ = timed


@final
class DataLoaderKind(DataKind):
    """``torch.utils.data.DataLoader``: its batches are the global ones, of which the process loads its own examples."""

    has_batches: ClassVar[bool] = True

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a ``DataLoader`` of the process's rows of each global batch, without those in which it has none."""
        part, batch_size = sharding.part, sharding.batch_size
        if batch_size is None:
            _check_batches(data, part)
        if not _is_stream(data):
            return _with_sampler(data, _sampler_part(data, part, batch_size, sharding.seed))
        if batch_size not in (None, data.batch_size):
            raise ConfigError(
                f"the DataLoader reads a stream in batches of {data.batch_size}, but batch_size={batch_size}. Its "
                "batches are the global ones: give it that batch size, or remove batch_size."
            )
        return _stream(lambda: without_last_empty(map(part.of, checked(data, part.count, count_rows))))

    def local_batches(self, data: Any, part: Callable[[], Part]) -> Any:
        """Returns the process's rows of each batch; every process loads all of a stream."""
        if _is_stream(data):
            return super().local_batches(data, part)
        rows: deque[int] = deque()

        @lru_cache(maxsize=1)
        def loader_of(own: Part) -> Any:
            _check_batches(data, own)
            return _with_sampler(data, _sampler_part(data, own, None, 0, rows))

        def start() -> Iterator[Any]:
            return (batch if rows.popleft() else cut(batch, 0, 0) for batch in loader_of(part()))

        loader_of(part())  # its errors
        return LocalBatches(start, lambda: self.length(data))

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of a loader with its own sampler or one that ``set_epoch`` determines, or of a stream."""
        self.shard(data, sharding)  # the same errors
        if _is_stream(data):
            return StreamData(sharding, _parts_of, partial(_read, data))
        return _LoaderEpochs(data, sharding)

    def traits(self, data: Any) -> Iterable[Any]:
        """Returns the indices that were drawn before, such as those of ``random_split``, and tensors in memory."""
        dataset, drawn = data.dataset, [getattr(data.sampler, "indices", None)]
        while isinstance(dataset, torch_data.Subset):
            drawn.append(dataset.indices)
            dataset = dataset.dataset
        tensors = dataset.tensors if isinstance(dataset, torch_data.TensorDataset) else ()
        return [*(np.asarray(each) for each in drawn if each is not None), *tensors]

    def batch_rows(self, data: Any) -> int | None:
        """Returns the loader's ``batch_size``."""
        rows: int | None = data.batch_size
        return rows

    def rows(self, data: Any) -> int | None:
        """Returns the number of indices that its sampler draws."""
        is_known = data.batch_size and not _is_stream(data) and hasattr(data.sampler, "__len__")
        return len(data.sampler) if is_known else None


def _is_stream(loader: Any) -> bool:
    """Whether the loader reads its examples in sequence, so that they cannot be selected by index."""
    return isinstance(loader.dataset, torch_data.IterableDataset)


def _check_batches(loader: Any, part: Part) -> None:
    if loader.batch_size is not None:
        check_global_batch(loader.batch_size, part.count)


@final
class _Stream(torch_data.IterableDataset):
    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


def _stream(batches: Callable[[], Iterator[Any]]) -> Any:
    """Returns a ``DataLoader`` of these batches."""
    return torch_data.DataLoader(_Stream(batches), batch_size=None)


def _parts_of(epochs: EpochData) -> Any:
    return _stream(lambda: epochs.batches(epochs.parts, epochs.epoch))


def _read(loader: Any, epoch: int) -> Any:
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)
    return loader


#: Those from which the orders of shards are drawn.
_generators: list[weakref.ref[torch.Generator]] = []


def generator_states() -> list[Any]:
    """The states of the generators from which the orders of shards are drawn, ``None`` of those that have gone; nothing
    if all have.
    """
    generators = [reference() for reference in _generators]
    return [each and each.get_state().numpy() for each in generators] if any(generators) else []


def set_generator_states(states: Iterable[Any]) -> None:
    """Gives them the ``states`` of another rank's."""
    for reference, state in zip(_generators, states, strict=False):
        generator = reference()
        if generator is not None and state is not None:
            generator.set_state(torch.tensor(state))


def _with_sampler(loader: Any, sampler: Any) -> Any:
    shared = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    }
    if loader.num_workers:
        shared.update(prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers)
    return torch_data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn, **shared)


def _sampler_part(
    loader: Any, part: Part, batch_size: int | None, seed: int, rows: deque[int] | None = None
) -> LocalBatches:
    """Returns a sampler of the process's indices of each global batch. If ``rows`` is given, it appends their numbers,
    and a batch without any yields its first example, as an empty list cannot be collated.
    """
    sampler = _global_sampler(loader, batch_size, seed)
    for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
        if generator is not None and all(reference() is not generator for reference in _generators):
            _generators.append(weakref.ref(generator))

    def batches() -> Iterator[list[int]]:
        if rows is not None:
            rows.clear()
        for indices in checked(sampler, part.count, len, only_last=rows is None):
            start, end = part.range(len(indices))
            if rows is not None:
                rows.append(end - start)
            if end > start or rows is not None:
                yield indices[start:end] or indices[:1]

    return LocalBatches(batches, lambda: _number_of(sampler, part) if rows is None else len(sampler))


def _number_of(sampler: Any, part: Part) -> int:
    """Returns in how many batches of ``sampler`` the process has rows; of a sampler of one's own, how many it has."""
    number = len(sampler)
    if type(sampler) is not torch_data.BatchSampler or not number:
        return number
    full = sampler.batch_size
    return part.batches_of(number, full, min(full, len(sampler.sampler) - full * (number - 1)))


def _global_sampler(loader: Any, batch_size: int | None, seed: int) -> Any:
    """Returns the sampler of the indices of each global batch, in the same order on all processes."""
    sampler = loader.batch_sampler
    if batch_size is not None:
        sampler = torch_data.BatchSampler(loader.sampler, batch_size, drop_last=loader.drop_last)
    if sampler is None:
        raise ConfigError(
            "the DataLoader yields single examples (batch_size=None): pass it the size of a global batch."
        )
    if isinstance(loader.sampler, torch_data.DistributedSampler):
        raise ConfigError(
            "the DataLoader has a DistributedSampler, which shards the data set itself: remove it, as choros shards "
            "the data set."
        )
    if hasattr(loader.sampler, "generator") and loader.sampler.generator is None:
        loader.sampler.generator = torch.Generator().manual_seed(seed)  # the same order on all ranks
    return sampler


@final
class _LoaderEpochs(EpochData):
    """The epochs of a loader whose examples have indices: only wanted ones are loaded; order by seed and epoch."""

    def __init__(self, loader: Any, sharding: Sharding) -> None:
        super().__init__(sharding, _LoaderEpochs._loader)
        self._sampler = _global_sampler(loader, sharding.batch_size, sharding.seed)
        self._order = loader.sampler
        self._generator = getattr(self._order, "generator", None)
        if self._generator is not None:  # with it the order goes on in another process, whatever that has drawn
            self.seed = self._generator.get_state().numpy()
        self._source = loader
        own = type(loader.batch_sampler) is torch_data.BatchSampler or hasattr(loader.batch_sampler, "set_epoch")
        sequential = type(self._order) is torch_data.SequentialSampler
        if not (own and (sequential or self._generator is not None or hasattr(self._order, "set_epoch"))):
            self.doubt = (
                f"the order of the DataLoader's {type(self._order).__name__} may differ when it is read again. Give it "
                "a generator, which choros sets at the beginning of an epoch, or a method set_epoch(epoch)."
            )

    def _loader(self) -> Any:
        indices = LocalBatches(lambda: self._indices(self.parts, self.epoch), lambda: len(self._sampler))
        return _with_sampler(self._source, indices)

    def begin_fit(self) -> None:
        """Goes on from the state of the first rank's generator: iterators draw from it, too, and not equally often."""
        self.seed = object_of_first(lambda: self.seed)

    agree = begin_fit

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Loads the examples of ``parts``; with workers of its own, as ``data`` may be read meanwhile."""
        yield from _with_sampler(self._source, self._indices(tuple(parts), epoch))

    def _indices(self, parts: Sequence[ShardBatches], epoch: int) -> Iterator[list[int]]:
        """Yields the indices of the examples of each batch of ``parts``."""
        for each in parts:
            part = each.part(self._local)
            for indices in each.taken_from(self._order_of(epoch)):
                start, end = part.range(len(indices))
                if end > start:
                    yield indices[start:end]

    def _order_of(self, epoch: int) -> Iterator[list[int]]:
        """Yields the indices of the examples of each global batch."""
        for each in (self._order, self._sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        if self._generator is not None:
            self._generator.set_state(torch.tensor(self.seed))
            if epoch:
                seed = np.random.SeedSequence((self._generator.initial_seed(), epoch)).generate_state(1, np.uint64)[0]
                self._generator.manual_seed(int(seed) >> 1)
        yield from self._sampler

    def _count(self, epoch: int) -> tuple[int, int, int]:
        return counted(map(len, self._order_of(epoch)))


KIND = DataLoaderKind()
