"""Epochs of every kind of data: any rank reads any shard of any epoch, from any batch on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.data.epochs import EpochData, epochs_of_steps
from choros.data.kinds import epochs_of_shard, kind_of
from choros.data.plan import OPEN, Ledger, ShardBatches
from choros.data.rows import Part, Sharding
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object

N, BATCH = 22, 5
X = np.arange(N, dtype="float32")[:, None]


def sharding(shard: int = 0, shards: int = 2, **settings: Any) -> Sharding:
    return Sharding(Part(shard, shards), **settings)


def epochs_of(data: Any, sharding: Sharding) -> EpochData:
    return kind_of(data).epochs(data, sharding)


def rows(batches: Any) -> list[list[int]]:
    """The values of ``x`` in each batch that has rows."""
    return [[int(value) for value in np.ravel(batch[0])] for batch in batches if len(batch[0])]


def iterated(epochs: EpochData) -> list[list[int]]:
    data = epochs.data
    return rows(data[index] for index in range(len(data))) if isinstance(data, keras.utils.PyDataset) else rows(data)


def shard_of(epochs: EpochData, epoch: int, shard: int, shards: int, start: int = 0) -> list[list[int]]:
    epochs.begin_epoch(epoch, [ShardBatches(shard, shards, range(start, OPEN))])
    return iterated(epochs)


def check(create: Callable[[], EpochData], *, shuffled: bool = False) -> None:
    """Any process that ``create`` stands for reads the same, in any order."""
    one, late = create(), create()
    seen = []
    for epoch in range(3):
        shards = [shard_of(one, epoch, shard, 2) for shard in range(2)]
        assert Counter(row for shard in shards for batch in shard for row in batch) == Counter(range(N))
        seen.append(shards)
    assert (seen[0] != seen[1] and seen[1] != seen[2]) if shuffled else seen[0] == seen[1] == seen[2]
    assert [late.doubt, one.doubt] == [None, None]

    assert shard_of(late, 2, 1, 2, start=3) == seen[2][1][3:]  # joins in the middle
    left_over = [ShardBatches(0, 2, range(1, 5, 2)), ShardBatches(1, 2, range(4, 5)), ShardBatches(0, 2, range(0))]
    for process in (one, late):
        assert rows(process.batches(left_over, 2)) == [seen[2][0][1], seen[2][0][3], seen[2][1][4]]
    one.begin_epoch(2, [])
    assert iterated(one) == []

    length = late.length(2)
    assert [length(shard, 2) for shard in range(2)] == [5, 5]
    assert [length(shard, 3) for shard in range(3)] == [5, 5, 4]  # the last batch has two rows
    thirds = [row for shard in range(3) for batch in shard_of(late, 2, shard, 3) for row in batch]
    assert sorted(thirds) == list(range(N))
    assert [len(shard_of(late, 2, shard, 3)) for shard in range(3)] == [5, 5, 4]


def case_arrays():
    check(lambda: epochs_of((X, X), sharding(batch_size=BATCH)))
    check(lambda: epochs_of((X, X), sharding(batch_size=BATCH, shuffle=True, seed=3)), shuffled=True)
    with pytest.raises(ConfigError, match=r"lengths \[\(3,\), \(22,\)\]: expected arrays of one length"):
        epochs_of((X, X[:3]), sharding(batch_size=BATCH))


def case_arrays_have_the_order_that_they_have_without_elastic_training():
    shard = hvd.shard((X, X), batch_size=BATCH, shuffle=True, seed=3)
    own = epochs_of_shard(shard, Part(0, 2))
    for epoch in range(2):
        shard.on_epoch_end()  # Keras calls it once before the first epoch
        assert shard_of(own, epoch, hvd.rank(), hvd.size()) == rows(shard[index] for index in range(len(shard)))


class Batches(keras.utils.PyDataset):
    """Batches in an order that it draws at the end of each epoch."""

    def __init__(self, shuffle: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.order = np.arange(N)
        self.rng = np.random.default_rng(3) if shuffle else None
        self.begun = 0

    def __len__(self) -> int:
        return -(-N // BATCH)

    def __getitem__(self, index: int) -> Any:
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        return X[chosen], X[chosen]

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        if self.rng is not None:
            self.order = self.rng.permutation(N)


def case_a_py_dataset():
    check(lambda: epochs_of(Batches(), sharding()))
    inner = Batches(shuffle=True)
    one, late = epochs_of(inner, sharding()), epochs_of(Batches(shuffle=True), sharding())
    seen = [[shard_of(one, epoch, shard, 2) for shard in range(2)] for epoch in range(3)]
    assert seen[0] != seen[1] != seen[2]
    assert [shard_of(late, 2, shard, 2) for shard in range(2)] == seen[2]
    assert rows(one.batches([ShardBatches(1, 2, range(1, 3))], 2)) == seen[2][1][1:3]


def case_a_py_dataset_that_another_fit_has_read_has_that_order_in_a_process_that_has_not():
    """And that order is the one that it has in one process of plain Keras."""
    inner, expected = Batches(shuffle=True), Batches(shuffle=True)
    first = epochs_of(inner, sharding())
    first.begin_fit()
    for epoch in range(2):
        first.begin_epoch(epoch, ())
        expected.on_epoch_end()
    second, late = epochs_of(inner, sharding()), epochs_of(Batches(shuffle=True), sharding())
    for epochs in (second, late):
        epochs.begin_fit()
    late.seed = second.seed  # of a commit, or of the other ranks
    for epochs in (first, second, late):
        if epochs is first:  # what choros.keras.shard returns is given to both
            epochs.begin_fit()
        everything = [ShardBatches(0, 1, range(OPEN))]
        for _ in range(2):  # before the epoch begins, and in it
            assert rows(epochs.batches(everything, 0)) == rows(expected[index] for index in range(len(expected)))
            epochs.begin_epoch(0, everything)


def case_data_that_the_first_rank_has_read_more_often_have_its_order_on_all():
    """A new rank has passed by the calls of fit in which the others have read a ``PyDataset``, or drawn numbers."""
    import torch

    generator, inner = torch.Generator().manual_seed(3), Batches(shuffle=True)
    loader = torch.utils.data.DataLoader(range(N), batch_size=BATCH, shuffle=True, generator=generator)
    if hvd.rank() == 0:
        for epoch in range(3):
            epochs_of(inner, sharding()).begin_epoch(epoch, ())
            list(loader)
    trained, evaluated = epochs_of(loader, sharding()), epochs_of(inner, sharding())
    trained.begin_fit(), evaluated.agree()
    batches = trained.batches([ShardBatches(0, 1, range(OPEN))], 0)
    orders = [[each.tolist() for each in batches], inner.order.tolist()]
    assert allgather_object(orders) == [orders] * hvd.size()
    assert orders[1] != Batches().order.tolist()


def case_epochs_of_steps_are_those_of_a_process_that_has_read_none_before():
    """In another call of fit, to which a new rank, or a job that is started again, comes."""

    def begun(epochs_before: int) -> list[Any]:
        epochs = epochs_of(Batches(), sharding())
        for epoch in range(epochs_before):
            epochs.begin_epoch(epoch, epochs.parts)
        steps = epochs_of_steps(epochs, 2, Part(0, 2))
        return [rows(steps.batches([ShardBatches(0, 2, range(OPEN))], epoch)) for epoch in range(3)]

    assert begun(2) == begun(0)


def case_an_epoch_without_batches_here_is_no_longer_one_for_the_next_fit():
    epochs = epochs_of(Batches(), sharding())
    data = epochs.data
    epochs.begin_epoch(0, [])
    data.on_epoch_begin()
    assert data.num_batches == 0
    data.on_epoch_end()
    assert data.num_batches == 5


def case_what_shard_returns_remembers_its_source():
    shard = hvd.shard(Batches())
    check(lambda: epochs_of_shard(shard, Part(0, 2)))
    (part,) = epochs_of_shard(shard, Part(0, 1)).parts
    assert (part.shard, part.shards) == (hvd.rank(), hvd.size())


def case_what_the_program_has_sharded_is_in_doubt():
    own = X[hvd.rank() :: hvd.size()]
    for data in (own, hvd.shard(X), hvd.shard((X, X))):
        epochs = epochs_of_shard(data, Part(hvd.rank(), hvd.size()))
        assert "Pass all data to choros.keras.shard" in str(epochs.doubt)
        assert epochs.data is data


def case_tf_data():
    import tensorflow as tf

    source = tf.data.Dataset.from_tensor_slices((X, X))
    check(lambda: epochs_of(source.batch(BATCH), sharding()))
    check(lambda: epochs_of_shard(hvd.shard(source, batch_size=BATCH), Part(0, 2)))
    check(lambda: epochs_of(source.shuffle(N, seed=3).batch(BATCH).prefetch(2), sharding()), shuffled=True)
    filtered = source.filter(lambda x, y: x[0] >= 0).batch(BATCH)  # of an unknown number of batches
    check(lambda: epochs_of(filtered, sharding()))


def case_tf_data_that_do_not_end():
    import tensorflow as tf

    def endless() -> EpochData:
        source = tf.data.Dataset.from_tensor_slices((X, X)).shuffle(N, seed=3).repeat().batch(BATCH)
        return epochs_of_steps(epochs_of(source, sharding()), 3, Part(0, 2))

    one, late = endless(), endless()
    wanted, iterator, seen = [ShardBatches(1, 2, range(OPEN))], iter(()), []
    for epoch in range(3):  # as in Keras, of whose ``fit`` two epochs are a pass and a little more
        one.begin_epoch(epoch, wanted)
        assert one.goes_on == (epoch > 0)
        iterator = iterator if one.goes_on else iter(one.data)
        seen.append(rows(next(iterator) for _ in range(3)))
    assert [rows(late.batches([ShardBatches(1, 2, range(3))], epoch)) for epoch in range(3)] == seen
    assert shard_of(late, 2, 1, 2, start=1) == seen[2][1:]
    assert [one.number_of_batches, one.length(2)(1, 2)] == [3, 3]
    one.begin_epoch(3, [ShardBatches(0, 1, range(OPEN))])  # as one rank is left
    assert not one.goes_on


def case_tf_data_without_a_seed_is_an_error():
    import tensorflow as tf

    source = tf.data.Dataset.from_tensor_slices((X, X)).shuffle(N)
    with pytest.raises(ConfigError, match="shuffled without a seed"):
        epochs_of(source.batch(BATCH), sharding())
    with pytest.raises(ConfigError, match="is smaller than the 2 replicas"):
        epochs_of(tf.data.Dataset.from_tensor_slices((X, X)).batch(1), sharding())


def case_tf_data_that_processes_read_in_part_is_in_doubt():
    import tensorflow as tf

    source = tf.data.Dataset.from_tensor_slices((X, X)).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    assert "set options" in str(epochs_of(source.with_options(options), sharding()).doubt).lower()


def case_a_data_loader():
    import torch
    import torch.utils.data as torch_data

    source = torch_data.TensorDataset(torch.from_numpy(X), torch.from_numpy(X))
    check(lambda: epochs_of(torch_data.DataLoader(source, batch_size=BATCH), sharding()))
    check(lambda: epochs_of_shard(hvd.shard(torch_data.DataLoader(source), batch_size=BATCH), Part(0, 2)))

    def shuffled() -> EpochData:
        generator = torch.Generator().manual_seed(3)
        return epochs_of(torch_data.DataLoader(source, batch_size=BATCH, shuffle=True, generator=generator), sharding())

    check(shuffled, shuffled=True)
    loader = torch_data.DataLoader(source, batch_size=BATCH, shuffle=True)
    check(lambda: epochs_of(loader, sharding()), shuffled=True)

    drawn = torch.Generator().manual_seed(3)
    torch.randperm(N, generator=drawn)  # by a fit before, which a job that goes on does not repeat
    loader = torch_data.DataLoader(source, batch_size=BATCH, shuffle=True, generator=drawn)
    epochs, others, everything = shuffled(), epochs_of(loader, sharding()), [ShardBatches(0, 1, range(OPEN))]
    epochs.seed = others.seed
    for epoch in range(2):
        assert rows(epochs.batches(everything, epoch)) == rows(others.batches(everything, epoch))

    loader = torch_data.DataLoader(source, batch_size=BATCH, num_workers=1, persistent_workers=True)
    epochs = epochs_of(loader, sharding(0, 1))
    being_read = iter(epochs.data)
    first = rows([next(being_read)])
    assert rows(epochs.batches([ShardBatches(0, 1, range(1))], 0)) == first  # meanwhile
    assert len(rows(being_read)) == -(-N // BATCH) - 1


def case_a_data_loader_whose_order_may_differ_is_in_doubt():
    import torch
    import torch.utils.data as torch_data

    class Sampler(torch_data.Sampler):
        def __iter__(self) -> Any:
            return iter(np.random.permutation(N).tolist())

        def __len__(self) -> int:
            return N

    source = torch_data.TensorDataset(torch.from_numpy(X), torch.from_numpy(X))
    loader = torch_data.DataLoader(source, batch_size=BATCH, sampler=Sampler())
    assert "Sampler may differ when it is read again" in str(epochs_of(loader, sharding()).doubt)


def case_a_torch_stream():
    import torch
    import torch.utils.data as torch_data

    class Stream(torch_data.IterableDataset):
        def __iter__(self) -> Any:
            return ((torch.from_numpy(x), torch.from_numpy(x)) for x in X)

    check(lambda: epochs_of(torch_data.DataLoader(Stream(), batch_size=BATCH), sharding()))


def case_grain():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source([(x, x) for x in X])
    check(lambda: epochs_of(source.batch(BATCH), sharding()))
    check(lambda: epochs_of_shard(hvd.shard(source, batch_size=BATCH), Part(0, 2)))
    check(lambda: epochs_of(source.shuffle(seed=3).batch(BATCH), sharding()))
    check(lambda: epochs_of(source.to_iter_dataset().batch(BATCH), sharding()))


def case_a_generator_is_in_doubt():
    epochs = epochs_of(iter([(X[:4], X[:4]), (X[4:6], X[4:6])]), sharding(1))
    assert "cannot be read again" in str(epochs.doubt)
    assert rows(epochs.data) == [[2, 3], [5]]
    assert Ledger.of_epoch(0, 2).lost({0: 0}).is_done(epochs.length(0))


class Changing(keras.callbacks.Callback):
    """Trains on another shard in each epoch, and on none in the fourth."""

    PARTS: tuple[tuple[ShardBatches, ...], ...] = (
        (ShardBatches(1, 2, range(2, OPEN)),),
        (ShardBatches(0, 1, range(OPEN)),),
        (ShardBatches(2, 3, range(OPEN)),),
        (),
    )

    def __init__(self, epochs: EpochData, first: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.first = first

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.begin_epoch(epoch, self.PARTS[epoch + self.first])


def check_fit(create: Callable[[], EpochData], first: int = 0) -> None:
    """Keras trains on what each epoch says."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    mean = keras.metrics.MeanMetricWrapper(lambda true, predicted: true, name="mean")
    model.compile("sgd", "mse", metrics=[mean])
    epochs, expected = create(), create()
    history = model.fit(epochs.data, epochs=4 - first, shuffle=False, verbose=0, callbacks=[Changing(epochs, first)])
    for epoch, parts in enumerate(Changing.PARTS[first:3]):
        expected.begin_epoch(epoch, parts)
        own = [row for batch in rows(expected.batches(parts, epoch)) for row in batch]
        np.testing.assert_allclose(history.history["mean"][epoch], np.mean(own), rtol=1e-5)


def case_keras_trains_on_other_shards_in_each_epoch():
    check_fit(lambda: epochs_of((X, X), sharding(batch_size=BATCH, shuffle=True)))
    check_fit(lambda: epochs_of(Batches(shuffle=True, workers=2), sharding()))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        source = tf.data.Dataset.from_tensor_slices((X, X)).shuffle(N, seed=3).batch(BATCH)
        check_fit(lambda: epochs_of(source, sharding()))
    if keras.backend.backend() == "torch":
        import torch
        import torch.utils.data as torch_data

        source = torch_data.TensorDataset(torch.from_numpy(X), torch.from_numpy(X))
        generator = torch.Generator().manual_seed(3)
        loader = torch_data.DataLoader(source, batch_size=BATCH, shuffle=True, generator=generator)
        check_fit(lambda: epochs_of(loader, sharding()))
        grain = pytest.importorskip("grain")
        numbers = grain.MapDataset.source([(x, x) for x in X]).shuffle(seed=3).batch(BATCH)
        check_fit(lambda: epochs_of(numbers, sharding()), first=1)  # see begin_epoch
