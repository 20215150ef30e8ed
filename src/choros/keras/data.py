"""This rank's part of a data set, whatever Keras takes as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, final

import keras
import numpy as np

from choros.comm import topology
from choros.errors import ConfigError
from choros.parallel.data import Part, count_rows, cut, data_loader, grain_data, kinds, tf_data
from choros.parallel.data.shard import batch_ranges, check_batch_size, example_indices
from choros.topology import Topology, shard_range

__all__ = ["PyDatasetPart", "shard"]


def shard(
    data: Any, batch_size: int | None = None, *, shuffle: bool = False, seed: int = 0, initial_epoch: int = 0
) -> Any:
    """This rank's part of ``data``.

    With ``batch_size`` the result yields batches: those that one process would see, each dealt out to all
    ranks, so that training on it is training on the whole. Ranks' parts may differ in size, also in their
    number; choros' callbacks see to it that no rank waits and every example counts the same.

    Pass ``shuffle=False`` to ``model.fit``: of a ``PyDataset`` (which arrays become here) it reorders the
    *batches*, on each rank by itself, and a step then mixes parts of different global batches.

    Args:
        data: what ``model.fit`` takes:

            - *arrays*, or tuples, lists and dicts of them, such as ``(x, y)``. Without ``batch_size``: the
              rows of ``shard_range``. With it: a ``keras.utils.PyDataset``.
            - ``tf.data.Dataset`` of examples. Without ``batch_size``: every size-th element, by
              ``Dataset.shard``; do so early, before elements are decoded. With it: batches, split.
            - ``keras.utils.PyDataset``: its batches are the global ones. Each rank makes all of each batch.
            - torch ``DataLoader``: its batches, or those of ``batch_size``, are the global ones. Only this
              rank's examples are loaded. Random samplers that have no generator get one seeded alike.
            - Grain ``MapDataset`` or ``IterDataset`` of examples.
        batch_size: examples in a batch of *all* ranks together.
        shuffle: for arrays with ``batch_size``: deal out all examples anew each epoch.
        seed: of the shuffle; the same on all ranks.
        initial_epoch: the epoch at which training resumes, whose order the shuffle goes on with.

    Returns:
        An object of the same kind, for arrays with ``batch_size`` a ``PyDataset``.

    Raises:
        ConfigError: the kind of data is not known, or the batch size does not fit it.

    Example:
        >>> import numpy as np, choros.keras as hvd
        >>> hvd.init()
        >>> batches = hvd.shard((np.arange(10), np.arange(10)), batch_size=4)
        >>> [x.tolist() for x, y in (batches[i] for i in range(len(batches)))]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    place = topology("shard()")
    if batch_size is not None:
        check_batch_size(batch_size, place.size)
    split = next((splitter for is_kind, splitter in _KINDS if is_kind(data)), None)
    if split is None:
        return _split_arrays(data, batch_size, place, shuffle=shuffle, seed=seed, epoch=initial_epoch)
    if shuffle:
        raise ConfigError(f"shuffle=True is for arrays; shuffle the {type(data).__name__} itself, alike on all ranks.")
    return split(data, batch_size, place, seed=seed)


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────────


def _split_arrays(data: Any, batch_size: int | None, place: Topology, *, shuffle: bool, seed: int, epoch: int) -> Any:
    lengths = {np.shape(leaf)[:1] for leaf in keras.tree.flatten(data) if leaf is not None}
    if len(lengths) != 1 or lengths == {()}:
        raise ConfigError(
            f"shard() got a {type(data).__name__} whose parts have the lengths {sorted(lengths)}. It takes arrays of "
            "one length, tf.data, PyDataset, DataLoader and Grain data sets."
        )
    if batch_size is None:
        if shuffle:
            raise ConfigError("shuffle=True needs batch_size; without it the rows are split in their order.")
        ((n,),) = lengths
        return cut(data, *shard_range(n, place.rank, place.size))
    return _ArrayBatches(data, batch_size, place, shuffle=shuffle, seed=seed, epoch=epoch)


@final
class _ArrayBatches(keras.utils.PyDataset):
    """This rank's part of each global batch of arrays in memory."""

    def __init__(self, data: Any, batch_size: int, place: Topology, *, shuffle: bool, seed: int, epoch: int) -> None:
        super().__init__()
        self._data = data
        self._n = count_rows(data)
        self._ranges = batch_ranges(self._n, batch_size, place.rank, place.size)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = epoch
        self._order = self._draw()
        self._split = place.size > 1
        self._last: int | None = None

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Any:
        self._check_order(index)
        start, end = self._ranges[index]
        if self._order is None:
            return cut(self._data, start, end)
        chosen = self._order[start:end]
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[chosen], self._data)

    def _check_order(self, index: int) -> None:
        """Keras does not tell that it shuffles; the indices it asks for do."""
        if self._split and self._last is not None and index not in (0, self._last + 1):
            self._split = False
            warnings.warn(
                "Keras reorders these batches, on each rank by itself, so that a step mixes parts of different global "
                "batches: pass shuffle=False to fit, and shuffle=True to shard for a new order each epoch.",
                stacklevel=2,
            )
        self._last = index

    def on_epoch_end(self) -> None:
        """A new order, the same on all ranks."""
        self._epoch += 1
        self._order = self._draw()

    def _draw(self) -> Any:
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._n) if self._shuffle else None


# ── keras.utils.PyDataset ────────────────────────────────────────────────────────────────────────────


@final
class PyDatasetPart(keras.utils.PyDataset):
    """The process's rows of the batches of another ``PyDataset``, without batches in which it has none."""

    def __init__(self, inner: Any, part: Part) -> None:
        super().__init__(
            workers=inner.workers, use_multiprocessing=inner.use_multiprocessing, max_queue_size=inner.max_queue_size
        )
        self._inner = inner
        self._part = part
        batches: int | None = inner.num_batches
        # Only the last batch can be too small to have a row for every rank.
        if batches and count_rows(part.of(inner[batches - 1])) == 0:
            batches -= 1
        self._batches = batches

    @property
    def num_batches(self) -> int | None:
        """Batches in which this rank has rows; ``None`` for a data set without end."""
        return self._batches

    def __len__(self) -> int:
        return self._batches or 0

    def __getitem__(self, index: int) -> Any:
        return self._part.of(self._inner[index])

    def on_epoch_begin(self) -> None:
        """The inner data set's."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """The inner data set's."""
        self._inner.on_epoch_end()


def _split_py_dataset(data: Any, batch_size: int | None, place: Topology, *, seed: int) -> Any:
    del seed
    if batch_size is not None and (own := count_rows(data[0])) != batch_size:
        raise ConfigError(
            f"the PyDataset's batches have {own} examples, batch_size={batch_size} asks for others. Its batches are "
            "the global ones: make them that large, or leave batch_size out."
        )
    return PyDatasetPart(data, Part(place.rank, place.size))


# ── tf.data, torch DataLoader, Grain ─────────────────────────────────────────────────────────────────


def _split_tf_data(data: Any, batch_size: int | None, place: Topology, *, seed: int) -> Any:
    del seed
    if batch_size is None:
        return data.shard(place.size, place.rank)
    return tf_data.split(data.batch(batch_size), Part(place.rank, place.size))


def _split_data_loader(data: Any, batch_size: int | None, place: Topology, *, seed: int) -> Any:
    return data_loader.split(data, Part(place.rank, place.size), batch_size=batch_size, seed=seed)


def _split_grain(data: Any, batch_size: int | None, place: Topology, *, seed: int) -> Any:
    del seed
    import grain

    grain_data.refuse_loader(data)
    if isinstance(data, grain.MapDataset):
        if batch_size is None:
            start, end = shard_range(len(data), place.rank, place.size)
            return data[start:end]
        full_start, full_end = shard_range(batch_size, place.rank, place.size)
        mine = example_indices(len(data), batch_size, place.rank, place.size)
        return grain.MapDataset.source(_Chosen(data, mine)).batch(full_end - full_start)
    if batch_size is None:
        raise ConfigError("a grain.IterDataset is split batch by batch: pass shard(…, batch_size=…).")
    return grain_data.split(data.batch(batch_size), Part(place.rank, place.size))


@final
class _Chosen:
    """Some elements of a random-access data set."""

    def __init__(self, data: Any, indices: Any) -> None:
        self._data = data
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._indices[index])]


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[..., Any]], ...] = (
    (kinds.is_py_dataset, _split_py_dataset),
    (kinds.is_tf_data, _split_tf_data),
    (kinds.is_data_loader, _split_data_loader),
    (kinds.is_grain, _split_grain),
)
