"""Batches of arrays, and of a ``keras.utils.PyDataset``. The module imports Keras: import it on demand."""

import itertools
import warnings
from abc import ABC
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, final

import keras
import numpy as np

from choros.data.epochs import EpochData, FixedData, IndexedData
from choros.data.kinds import DataKind
from choros.data.plan import ShardBatches
from choros.data.rows import (
    Part,
    Sharding,
    check_global_batch,
    common_rows,
    count_rows,
    cut,
    note_rows,
    order_of,
    shuffled_batch,
)
from choros.errors import ConfigError
from choros.parallel.objects import object_of_first
from choros.parallel.structure import leaves, map_structure


class _InOrder(keras.utils.PyDataset, ABC):
    """Parts of batches, which processes must read in the same order; ``checked``: they read one after the other."""

    #: See ``hand_over_shards``.
    of_arrays = False

    def __init__(self, *, checked: bool, **options: Any) -> None:
        super().__init__(**options)
        self._is_checked = checked
        self._last: int | None = None

    def check_order(self, index: int) -> None:
        """Warns if Keras shuffles batches: there is no public flag, but the requested indices show it."""
        if self._is_checked and self._last is not None and index not in (0, self._last + 1):
            self._is_checked = False
            warnings.warn(
                "Keras reorders these batches on each rank independently, so that a step mixes shards of different "
                "global batches: pass shuffle=False to fit, and shuffle=True to shard for a new order each epoch.",
                stacklevel=3,
            )
        self._last = index


@final
class PartsDataset(_InOrder):
    """This process's batches, as each epoch of ``source`` determines. Threads of its own read ahead, as Keras' workers
    may keep batches of one epoch for the next. Keras asks for ``longest`` before epochs, which may have fewer; without
    it all epochs are the same, and the next one begins whenever all of one was read.
    """

    def __init__(self, source: IndexedData, longest: int | None = None, workers: int = 1, ahead: int = 0) -> None:
        super().__init__(checked=source.of_arrays and source.parts[0].shards > 1)
        self.of_arrays = source.of_arrays
        self._source = source
        self._longest = longest
        self._is_read = False
        self._readers = ThreadPoolExecutor(workers) if workers > 1 else None
        self._ahead = ahead
        self._read: dict[int, Future[Any]] = {}
        self._parts = source.parts
        self._begins = False

    def on_epoch_begin(self) -> None:
        """Next, Keras asks for the number of batches that it reads in this epoch."""
        self._begins = True

    def on_epoch_end(self) -> None:
        """Begins the next order if all was read: Keras calls this also before the first epoch, or amid the data."""
        self._begins = False  # it may have had no batches
        if self._longest is None and self._is_read:
            self._source.begin_epoch(self._source.epoch + 1, self._source.parts)
            self._is_read = False

    @property
    def num_batches(self) -> int:
        """The number of batches in the epoch that begins; else the largest possible."""
        return self._source.number() if self._begins or self._longest is None else self._longest

    def __len__(self) -> int:
        return self._source.number()

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        self._begins = False
        self.check_order(index)
        self._is_read = self._is_read or index == len(self) - 1
        if index >= len(self):  # this process has fewer batches, or none, and Keras builds the model from one
            return self._source.rows(Part(0, 1), index, self._source.epoch)
        if self._readers is None:
            return self._source.at(index)
        if index == 0 or self._parts is not self._source.parts:
            for each in self._read.values():
                each.cancel()
            self._read, self._parts = {}, self._source.parts
        for later in range(index, min(index + 1 + self._ahead, self._source.number())):
            if later not in self._read:
                self._read[later] = self._readers.submit(self._source.at, later)
        return self._read.pop(index).result()


def array_epochs(data: Any, batch_size: int, sharding: Sharding) -> IndexedData:
    """Returns the epochs of arrays in memory: arrays of one length, or tuples, lists and dicts of them."""
    n = common_rows(data)
    check_global_batch(batch_size, sharding.part.count)
    # Of pandas' objects, indices are labels.
    data = map_structure(lambda leaf: leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf, data)
    number = -(-n // batch_size)

    def rows(part: Part, index: int, epoch: int) -> Any:
        first = index * batch_size
        start, end = (first + row for row in part.range(min(batch_size, n - first)))
        if not sharding.shuffle:
            return map_structure(_converted, cut(data, start, end))
        indices = order_of(n, epochs.seed, epoch)[start:end]
        return map_structure(lambda leaf: _converted(leaf[indices]), data)

    epochs = IndexedData(sharding, lambda own: PartsDataset(own, number), lambda: number, rows)
    epochs.of_arrays = True
    return epochs


def _converted(array: Any) -> Any:
    """As Keras converts arrays in memory: other floats to its own, and text to a tensor, which TensorFlow alone has."""
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.kind in "OSU" and keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(array)
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


@final
class PyDatasetKind(DataKind):
    """``keras.utils.PyDataset``: each process produces all of each global batch; shuffled, the last stays the last."""

    shuffles: ClassVar[bool] = True
    has_batches: ClassVar[bool] = True
    augments: ClassVar[bool] = True

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a ``PyDataset`` of the process's rows."""
        batch_size, first = sharding.batch_size, data[0]
        own = count_rows(first)
        note_rows(first)
        if batch_size not in (None, own):
            raise ConfigError(
                f"the PyDataset's batches have {own} examples, but batch_size={batch_size}. Its batches are the global "
                "ones: give it that batch size, or remove batch_size."
            )
        check_global_batch(own, sharding.part.count)
        return _PyDatasetPart(data, sharding)

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of the data set, if it has an end."""
        if data.num_batches is None:
            doubt = "a PyDataset without a number of batches has no epochs."
            return FixedData(sharding, lambda: self.split(data, sharding.part), doubt)
        self.shard(data, sharding)  # the same errors
        return _PyDatasetEpochs(data, sharding)

    def traits(self, data: Any) -> Iterable[Any]:
        """Returns the labels of the first batch."""
        return leaves(keras.utils.unpack_x_y_sample_weight(data[0])[1])

    def batches(self, data: Any) -> Iterator[Any]:
        """Yields the batches by index, with the calls of its methods for the beginning and the end of an epoch."""
        data.on_epoch_begin()
        for index in itertools.count() if data.num_batches is None else range(data.num_batches):
            yield data[index]
        data.on_epoch_end()

    def length(self, data: Any) -> int | None:
        """Returns the number of batches; ``None`` for an infinite data set."""
        number: int | None = data.num_batches
        return number

    def batch_rows(self, data: Any) -> int | None:
        """Returns the number of rows of the first batch."""
        return count_rows(data[0])


@final
class _PyDatasetPart(_InOrder):
    """The process's rows of each batch of another ``PyDataset``, without the last one if it has none in it."""

    def __init__(self, inner: Any, sharding: Sharding) -> None:
        super().__init__(
            checked=sharding.part.count > sharding.part.local and inner.workers < 2 and not inner.use_multiprocessing,
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner, self._sharding, self._epoch = inner, sharding, sharding.epoch
        self._batches: int | None = inner.num_batches
        if self._batches and count_rows(sharding.part.of(inner[self._batches - 1])) == 0:
            self._batches -= 1

    @property
    def num_batches(self) -> int | None:
        """The number of batches; ``None`` for an infinite data set."""
        return self._batches

    def __len__(self) -> int:
        return self._batches or 0

    def __getitem__(self, index: int) -> Any:
        self.check_order(index)
        number = self._inner.num_batches
        if self._sharding.shuffle and number is not None:
            index = shuffled_batch(index, number, self._sharding.seed, self._epoch)
        return self._sharding.part.of(self._inner[index])

    def on_epoch_begin(self) -> None:
        """Calls the inner data set's method."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Calls the inner data set's method, and draws a new order, the same on all processes."""
        self._inner.on_epoch_end()
        self._epoch += 1


#: The attribute of a data set that says how many epochs have begun, and how many ended, in all calls of ``fit``.
_EPOCHS = "_choros_epochs"
#: The attribute that says how often its method for the end of an epoch was called.
_ENDED = "_choros_ended"


@final
class _PyDatasetEpochs(IndexedData):
    """The epochs of a ``PyDataset``, whose methods for the beginning and the end of an epoch are called once each.
    ``seed``: also how many epochs have begun before this ``fit``, of which a new process knows nothing.
    """

    def __init__(self, inner: Any, sharding: Sharding) -> None:
        def make(own: IndexedData) -> PartsDataset:
            return PartsDataset(own, inner.num_batches, inner.workers, inner.max_queue_size)

        def rows(part: Part, index: int, epoch: int) -> Any:
            if sharding.shuffle:
                index = shuffled_batch(index, inner.num_batches, self.seed[0], epoch)
            return part.of(inner[index])

        super().__init__(sharding, make, lambda: inner.num_batches, rows)
        self._inner, self._counts = inner, [0, 0]
        self.seed = [sharding.seed, 0]

    def begin_fit(self) -> None:
        """Counts the epochs on from those of earlier calls of ``fit``."""
        self._counts = vars(self._inner).setdefault(_EPOCHS, [0, 0])
        self.seed = [self.seed[0], self._counts[0]]

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Begins the epoch after all before it have ended."""
        super().begin_epoch(epoch, parts)
        self._counts[0] = self._end_before(epoch) + 1
        self._inner.on_epoch_begin()

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``, in the order of the epoch, which may not have begun here yet."""
        self._end_before(epoch)
        return super().batches(parts, epoch)

    def _end_before(self, epoch: int) -> int:
        """Ends the epochs before this one; not at their own end, as their batches may be read again until now."""
        before: int = self.seed[1] + epoch - self.first
        while self._counts[1] < before:
            self._end()
        return before

    def agree(self) -> None:
        """Calls the method for the end of an epoch as often as the first rank did, in calls that this one passed by."""
        ended = object_of_first(lambda: vars(self._inner).get(_ENDED, 0))
        while vars(self._inner).get(_ENDED, 0) < ended:
            self._end()

    def _end(self) -> None:
        self._counts[1] += 1
        vars(self._inner)[_ENDED] = vars(self._inner).get(_ENDED, 0) + 1
        self._inner.on_epoch_end()


KIND = PyDatasetKind()
