"""Every kind of data set distributed to two real replicas, one per process."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import grain
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.utils.data as torch_data
from numpy.typing import NDArray

import choros
import choros.keras as choros_keras
from arrays.frameworks import FRAMEWORK, make
from choros.arrays import adapter_of
from choros.data.kinds import LocalBatches, kind_of
from choros.distribute import AutoShardPolicy, datasets
from choros.distribute.replicas import ProcessReplicas
from choros.errors import ConfigError, MismatchError
from choros.parallel import ops
from choros.parallel.objects import allgather_object, broadcast_object

#: Examples and global batch: the last batch is full, uneven, or has no row for the second replica.
SIZES = ((12, 4), (11, 4), (9, 4))
import_module(FRAMEWORK)


def replicas() -> ProcessReplicas:
    return ProcessReplicas()


def examples(n: int) -> dict[str, NDArray]:
    return {"x": np.arange(2 * n, dtype=np.float32).reshape(n, 2), "y": np.arange(n, dtype=np.int32)}


def batches_of(n: int, batch: int) -> list[dict[str, NDArray]]:
    whole = examples(n)
    return [{key: value[i : i + batch] for key, value in whole.items()} for i in range(0, n, batch)]


class Examples(torch_data.Dataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.arange(2.0) + 2 * index, "y": torch.tensor(index, dtype=torch.int32)}


class Stream(torch_data.IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return (Examples(self.n)[index] for index in range(self.n))


class Batches(keras.utils.PyDataset):
    """Counts its epochs."""

    def __init__(self, n: int, batch: int) -> None:
        super().__init__()
        self.batches = batches_of(n, batch)
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]

    def on_epoch_end(self) -> None:
        self.epochs += 1


def tensors(batch: dict[str, NDArray]) -> dict[str, Any]:
    return {key: make(value) for key, value in batch.items()}


def source(n: int) -> Any:
    whole = examples(n)
    return grain.MapDataset.source([{key: value[i] for key, value in whole.items()} for i in range(n)])


KINDS: dict[str, Callable[[int, int], Any]] = {
    "tf.data": lambda n, batch: tf.data.Dataset.from_tensor_slices(examples(n)).batch(batch),
    "PyDataset": Batches,
    "DataLoader": lambda n, batch: torch_data.DataLoader(Examples(n), batch),
    "stream": lambda n, batch: torch_data.DataLoader(Stream(n), batch),
    "MapDataset": lambda n, batch: source(n).batch(batch),
    "IterDataset": lambda n, batch: source(n).to_iter_dataset().batch(batch),
    "list": lambda n, batch: [tensors(each) for each in batches_of(n, batch)],
    "generator": lambda n, batch: (each for each in batches_of(n, batch)),
}


def hosts(batch: dict[str, Any]) -> dict[str, NDArray]:
    return {key: adapter_of(value).to_host(value) for key, value in batch.items()}


def check_parts(parts: list[dict[str, Any]], n: int, batch: int) -> None:
    """Fails unless this rank's batches and the others', step by step, are the global batches."""
    of_ranks = allgather_object([hosts(part) for part in parts])
    assert {len(each) for each in of_ranks} == {-(-n // batch)}
    for step, (global_batch, *theirs) in enumerate(zip(batches_of(n, batch), *of_ranks, strict=True)):
        for key, value in global_batch.items():
            np.testing.assert_array_equal(np.concatenate([each[key] for each in theirs]), value, err_msg=str(step))
            assert {each[key].dtype for each in theirs} == {value.dtype}
        sizes = [len(each["y"]) for each in theirs]
        assert max(sizes) - min(sizes) <= 1


def numbers(parts: Any, key: str | None = "y") -> list[list[int]]:
    """The examples of each batch."""
    return [np.asarray(part if key is None else part[key]).tolist() for part in parts]


def of_all_ranks(parts: list[list[int]]) -> list[list[list[int]]]:
    return allgather_object(parts)


def seen(parts: list[list[int]]) -> list[int]:
    """All examples that all ranks have seen, in order."""
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(of_all_ranks(parts))))


def case_every_kind_is_detected() -> None:
    names = {name: type(kind_of(kind(11, 4))).__name__ for name, kind in KINDS.items()}
    assert names == {
        "tf.data": "TfDataKind",
        "PyDataset": "PyDatasetKind",
        "DataLoader": "DataLoaderKind",
        "stream": "DataLoaderKind",
        "MapDataset": "GrainKind",
        "IterDataset": "GrainKind",
        "list": "ArrayKind",
        "generator": "ArrayKind",
    }
    rows = {name: kind_of(data := kind(11, 4)).batch_rows(data) for name, kind in KINDS.items()}
    assert [name for name, known in rows.items() if known == 4] == ["PyDataset", "DataLoader", "stream"]
    assert {known for name, known in rows.items()} == {4, None}
    static = KINDS["tf.data"](12, 4).unbatch().batch(4, drop_remainder=True)
    assert kind_of(static).batch_rows(static) == 4


def case_every_kind_is_distributed_once() -> None:
    for name, kind in KINDS.items():
        for n, batch in SIZES:
            distributed = datasets.distribute(kind(n, batch), replicas())
            assert datasets.is_distributed(distributed), name
            check_parts(list(distributed), n, batch)
            if name not in ("generator", "IterDataset", "stream"):
                assert len(distributed) == -(-n // batch), name
            if name != "generator":
                check_parts(list(distributed), n, batch)


def case_every_kind_is_split_for_fit_without_last_batches_that_are_empty() -> None:
    for name, kind in KINDS.items():
        for n, batch in SIZES:
            part = datasets.split_batches(kind(n, batch), replicas())
            parts = [part[i] for i in range(len(part))] if name == "PyDataset" else list(part)
            sizes = [len(hosts(each)["y"]) for each in parts]
            # Grain does not know which batch is the last: that may have no rows.
            known = name != "IterDataset"
            assert min(sizes if known else sizes[:-1]) > 0, name
            own = -(-n // batch) - (choros.rank() == 1 and n % batch == 1 and known)
            assert len(parts) == own, name
            assert seen(numbers(map(hosts, parts))) == list(range(n)), name
            if name in ("tf.data", "PyDataset", "MapDataset"):
                assert len(part) == own, name


def case_batches_in_the_middle_may_have_no_rows_for_a_replica() -> None:
    """In ``fit``, too, where the last ones may be left out."""
    twice = {
        "tf.data": lambda: KINDS["tf.data"](9, 4).repeat(2),
        "PyDataset": lambda: Repeated(9, 4),
        "stream": lambda: torch_data.DataLoader(RepeatedStream(9), None),
        "MapDataset": lambda: KINDS["MapDataset"](9, 4).repeat(2),
        "IterDataset": lambda: KINDS["MapDataset"](9, 4).repeat(2).to_iter_dataset(),
        "generator": lambda: (each for each in batches_of(9, 4) * 2),
    }
    for name, make_data in twice.items():
        for distribution in (datasets.distribute, datasets.split_batches):
            part = distribution(make_data(), replicas())
            in_order = name == "PyDataset" and distribution is datasets.split_batches
            sizes = [len(hosts(each)["y"]) for each in ((part[i] for i in range(len(part))) if in_order else part)]
            expected = [2, 2, 1 - choros.rank()] * 2
            assert sizes in (expected, expected[: 6 - choros.rank()]), name


class Repeated(Batches):
    def __init__(self, n: int, batch: int) -> None:
        super().__init__(n, batch)
        self.batches = self.batches * 2


class RepeatedStream(torch_data.IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return (tensors(each) for each in batches_of(self.n, 4) * 2)


def case_a_loader_with_small_batches_in_the_middle_is_an_error() -> None:
    loader = torch_data.DataLoader(Examples(5), batch_sampler=[[0, 1], [2], [3, 4]])
    with pytest.raises(ConfigError, match="only the last batch of a DataLoader may have fewer"):
        list(datasets.split_batches(loader, replicas()))
    sizes = [len(each["y"]) for each in datasets.distribute(loader, replicas())]
    assert sizes == [1, 1 - choros.rank(), 1]


def case_one_replica_gets_the_data_set_itself() -> None:
    before = choros.global_process_set.communicator.collectives
    alone = ProcessReplicas(alone=True)
    for kind in KINDS.values():
        data = kind(11, 4)
        assert datasets.distribute(data, alone) is data
        assert datasets.from_function(lambda context, data=data: data, alone) is data
        assert datasets.split_batches(data, alone) is data
    assert choros.global_process_set.communicator.collectives == before


def case_fit_on_a_distributed_data_set_has_no_empty_batches() -> None:
    for name in ("tf.data", "list", "DataLoader"):
        part = datasets.split_batches(datasets.distribute(KINDS[name](9, 4), replicas()), replicas())
        assert seen(numbers(map(hosts, part))) == list(range(9))
        assert not datasets.is_distributed(part)
        with pytest.raises(ConfigError, match="distributed to the replicas already"):
            datasets.distribute(datasets.distribute(KINDS[name](9, 4), replicas()), replicas())
    changed = datasets.distribute(KINDS["tf.data"](9, 4), replicas()).map(lambda batch: batch)
    with pytest.raises(ConfigError, match="transformed after the strategy had distributed it"):
        datasets.split_batches(changed, replicas())


def case_a_py_dataset_receives_on_epoch_end() -> None:
    data = Batches(8, 4)
    distributed = datasets.distribute(data, replicas())
    list(distributed)
    list(distributed)
    assert data.epochs == 2


def case_shuffled_data_loaders_have_the_same_order_on_all_ranks() -> None:
    loader = torch_data.DataLoader(Examples(11), 4, shuffle=True)
    distributed = datasets.distribute(loader, replicas())
    first, second = numbers(distributed), numbers(distributed)
    assert seen(first) == seen(second) == list(range(11))
    assert of_all_ranks(first) != of_all_ranks(second)


def case_elements_may_be_arrays_tuples_and_none() -> None:
    given = [(np.arange(3), [np.arange(6).reshape(3, 2), None]), (np.arange(1), [np.zeros((1, 2)), None])]
    whole, empty = datasets.distribute(given, replicas())
    rank = choros.rank()
    assert whole[0].tolist() == [[0, 1], [2]][rank]
    assert whole[1][0].tolist() == [[[0, 1], [2, 3]], [[4, 5]]][rank]
    assert whole[1][1] is None
    assert empty[1][0].shape == (1 - rank, 2)


# tf.data ----------------------------------------------------------------------------------------


def with_policy(dataset: Any, policy: AutoShardPolicy) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy(policy.value)
    return dataset.with_options(options)


def count_up(n: int, batch: int = 4) -> Any:
    return tf.data.Dataset.range(n).batch(batch)


class Files:
    """Files of records, the same for all ranks; the first number of each file is a multiple of 10."""

    def __init__(self, *lengths: int) -> None:
        self.directory = broadcast_object(tempfile.mkdtemp() if choros.rank() == 0 else None)
        self.names = [str(Path(self.directory) / f"{index}.tfrecord") for index in range(len(lengths))]
        self.numbers = [10 * index + i for index, length in enumerate(lengths) for i in range(length)]
        if choros.rank() == 0:
            for index, (name, length) in enumerate(zip(self.names, lengths, strict=True)):
                with tf.io.TFRecordWriter(name) as writer:
                    for i in range(length):
                        writer.write(str(10 * index + i).encode())
        ops.barrier()

    def read(self) -> Any:
        return tf.data.TFRecordDataset(self.names).map(tf.strings.to_number).batch(4)


def check_synchronized(distributed: Any) -> list[list[list[int]]]:
    """Iterates with a collective in every step, eagerly and in a ``tf.function``; returns all ranks' batches."""
    own = []
    for step, batch in enumerate(distributed):
        ops.allreduce(step, name="the program's own")
        own.append(batch.numpy().astype(int).tolist())

    @tf.function
    def iterate() -> Any:
        total = tf.constant(0.0)
        for batch in distributed:
            rows = tf.reduce_sum(tf.cast(batch, tf.float32))
            total += ops.allreduce(rows, choros.comm.Reduction.SUM, name="the program's own")
        return total

    theirs = of_all_ranks(own)
    assert len({len(each) for each in theirs}) == 1
    assert float(iterate()) == sum(sum(sum(batch) for batch in each) for each in theirs)
    return theirs


def case_no_batch_is_prefetched_before_the_program_requests_it() -> None:
    # Something parallel in the pipeline makes TensorFlow add a prefetch at its end, unless an option disables it.
    parallel = tf.data.Dataset.range(12).map(lambda i: i, num_parallel_calls=tf.data.AUTOTUNE).filter(lambda _: True)
    communicator = choros.global_process_set.communicator
    iterator = iter(datasets.from_function(lambda context: parallel.batch(2), replicas()))
    before = communicator.collectives
    next(iterator)
    time.sleep(0.2)
    assert communicator.collectives == before + 1


def case_tf_data_in_a_tf_function() -> None:
    distributed = datasets.distribute(count_up(9), replicas())
    assert distributed.element_spec == tf.TensorSpec([None], tf.int64)
    assert check_synchronized(distributed) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], []]]


def case_off_reads_all_data_on_all_ranks() -> None:
    theirs = check_synchronized(datasets.distribute(with_policy(count_up(9), AutoShardPolicy.OFF), replicas()))
    assert [sorted(itertools.chain(*each)) for each in theirs] == [list(range(9))] * 2
    assert [len(batch) for batch in theirs[0]] == [2, 2, 2, 2, 1]
    part = datasets.split_batches(with_policy(count_up(9), AutoShardPolicy.OFF), replicas())
    assert sorted(itertools.chain(*numbers(part, None))) == list(range(9))


def case_file_reads_a_share_of_the_files() -> None:
    files = Files(5, 3, 6)  # 11 examples for rank 0, 3 for rank 1
    for policy in (AutoShardPolicy.FILE, AutoShardPolicy.AUTO):
        theirs = check_synchronized(datasets.distribute(with_policy(files.read(), policy), replicas()))
        assert sorted(itertools.chain(*itertools.chain(*theirs))) == files.numbers
        assert [[len(batch) for batch in each] for each in theirs] == [[2, 2, 2, 2, 2, 1], [2, 1, 0, 0, 0, 0]]
    part = numbers(datasets.split_batches(files.read(), replicas()), None)
    assert min(map(len, part)) > 0
    assert seen(part) == files.numbers


def case_files_are_found_inside_interleave() -> None:
    files = Files(5, 3)
    names = tf.data.Dataset.list_files(f"{files.directory}/*", seed=1)
    read = names.interleave(lambda name: tf.data.TFRecordDataset(name).map(tf.strings.to_number)).batch(4)
    theirs = check_synchronized(datasets.distribute(with_policy(read, AutoShardPolicy.FILE), replicas()))
    assert sorted(sorted(itertools.chain(*each)) for each in theirs) == [[0, 1, 2, 3, 4], [10, 11, 12]]


def case_fewer_files_than_processes() -> None:
    files = Files(6)
    with pytest.raises(ConfigError, match="reads 1 files, which 2 processes cannot share"):
        datasets.distribute(with_policy(files.read(), AutoShardPolicy.FILE), replicas())
    with pytest.raises(ConfigError, match="reads no files"):
        datasets.distribute(with_policy(count_up(4), AutoShardPolicy.FILE), replicas())
    theirs = check_synchronized(datasets.distribute(files.read(), replicas()))
    assert theirs == [[[0, 1], [4]], [[2, 3], [5]]]


def case_hint_shards_at_the_hint() -> None:
    hint = tf.data.experimental.SHARD_HINT
    given = tf.data.Dataset.range(9).shard(hint, hint).batch(4)
    theirs = check_synchronized(datasets.distribute(with_policy(given, AutoShardPolicy.HINT), replicas()))
    assert theirs == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], []]]


def case_tf_data_from_a_function() -> None:
    def make_dataset(context: Any) -> Any:
        assert (context.num_input_pipelines, context.input_pipeline_id) == (2, choros.rank())
        dataset = tf.data.Dataset.range(7).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(context.get_per_replica_batch_size(2))

    expected = [[[0], [2], [4], [6]], [[1], [3], [5], []]]
    distributed = datasets.from_function(make_dataset, replicas())
    assert int(distributed.cardinality()) == 4
    assert check_synchronized(distributed) == expected
    unknown = datasets.from_function(lambda context: make_dataset(context).filter(lambda _: True), replicas())
    assert check_synchronized(unknown) == expected
    own = [batch for batch in expected[choros.rank()] if batch]
    assert numbers(datasets.split_batches(unknown, replicas()), None) == own


def case_infinite_data_sets_need_no_collective() -> None:
    distributed = datasets.from_function(lambda context: count_up(4).repeat(), replicas())
    before = choros.global_process_set.communicator.collectives
    assert len(list(distributed.take(5))) == 5
    assert choros.global_process_set.communicator.collectives == before
    mixed = datasets.from_function(
        lambda context: count_up(4).repeat() if choros.rank() == 0 else count_up(4), replicas()
    )
    assert [len(batch) for batch in mixed.take(3)] == ([4, 4, 4] if choros.rank() == 0 else [4, 0, 0])


def case_batches_of_no_rows_have_the_structure_of_others() -> None:
    def make_dataset(context: Any) -> Any:
        n = 3 if context.input_pipeline_id == 0 else 0
        whole = {"x": tf.zeros([n, 2]), "name": tf.fill([n], "a"), "z": tf.zeros([n, 1], tf.uint8)}
        return tf.data.Dataset.from_tensor_slices(whole).batch(2).filter(lambda _: True)

    parts = list(datasets.from_function(make_dataset, replicas()))
    shapes = [{key: tuple(value.shape) for key, value in part.items()} for part in parts]
    rows = ([2, 1], [0, 0])[choros.rank()]
    assert shapes == [{"x": (n, 2), "name": (n,), "z": (n, 1)} for n in rows]


def case_a_shuffle_without_a_seed_is_rejected() -> None:
    shuffled = tf.data.Dataset.range(12).shuffle(5)
    nested = tf.data.Dataset.range(3).flat_map(lambda i: tf.data.Dataset.range(3).shuffle(3))
    for dataset in (shuffled.batch(4), shuffled.map(lambda i: i + 1).batch(4).prefetch(1), nested.batch(4)):
        with pytest.raises(ConfigError, match=r"shuffled without a seed.*seed=…"):
            datasets.distribute(dataset, replicas())
    files = Files(2, 2)
    unordered = tf.data.TFRecordDataset(tf.data.Dataset.list_files(f"{files.directory}/*")).batch(4)
    with pytest.raises(ConfigError, match="shuffled without a seed"):
        datasets.distribute(unordered, replicas())
    within = files.read().unbatch().shuffle(5).batch(4)  # each rank in its own files
    assert (
        sorted(itertools.chain(*itertools.chain(*check_synchronized(datasets.distribute(within, replicas())))))
        == files.numbers
    )


def case_processes_have_other_rows() -> None:
    rank = choros.rank()
    whole = np.random.default_rng(rank).permutation(12)
    names = [f"/of/rank/{rank}/{number}" for number in whole]
    subset = torch_data.Subset(Examples(12), whole.tolist())
    tensors = torch_data.TensorDataset(torch.tensor(whole))
    others = [
        tf.data.Dataset.from_tensor_slices(whole).batch(4),
        tf.data.Dataset.from_tensor_slices(names).map(tf.strings.length).batch(4),
        tf.data.Dataset.range(12).shuffle(12, seed=rank + 1).batch(4),
        torch_data.DataLoader(subset, batch_size=4),
        torch_data.DataLoader(Examples(12), batch_size=4, sampler=torch_data.SubsetRandomSampler(whole)),
        torch_data.DataLoader(tensors, batch_size=4),
    ]
    for data in others:
        with pytest.raises(ConfigError, match="different data: rank 1 has not the same rows as rank 0"):
            datasets.distribute(data, replicas())
    same = tf.data.Dataset.from_tensor_slices(sorted(names)).map(tf.strings.length).batch(4)  # in other directories
    assert len(list(datasets.distribute(same, replicas()))) == 3
    own = datasets.distribute(with_policy(others[0], AutoShardPolicy.OFF), replicas())
    assert sorted(itertools.chain(*(batch.numpy().tolist() for batch in own))) == list(range(12))
    with pytest.raises(ConfigError, match="shuffled without a seed"):
        choros_keras.shard(tf.data.Dataset.range(12).shuffle(12), batch_size=4)


class Drawn(keras.utils.PyDataset):
    def __init__(self, order: NDArray) -> None:
        super().__init__()
        self.order = order

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = self.order[4 * index : 4 * index + 4]
        return np.zeros((4, 1)), rows


def case_a_py_dataset_in_another_order_on_each_process() -> None:
    with mock.patch.object(datasets._log, "warning") as warned:
        datasets.distribute(Drawn(np.arange(12)), replicas())
        assert not warned.called
        datasets.distribute(Drawn(np.random.default_rng(choros.rank()).permutation(12)), replicas())
    assert warned.called == (choros.rank() == 0)


def case_a_shuffle_with_a_seed_is_distributed() -> None:
    seeded = tf.data.Dataset.range(11).shuffle(11, seed=3).batch(4)
    distributed = datasets.distribute(seeded, replicas())
    first, second = numbers(distributed, None), numbers(distributed, None)
    assert seen(first) == seen(second) == list(range(11))
    assert of_all_ranks(first) != of_all_ranks(second)
    tf.random.set_seed(5)
    after = tf.data.Dataset.range(11).shuffle(11).batch(4)
    tf.random.set_seed(None)
    assert seen(numbers(datasets.distribute(after, replicas()), None)) == list(range(11))


# from functions, errors --------------------------------------------------------------------------


def case_iterables_from_a_function() -> None:
    for lengths in ((3, 1), (0, 2)):
        own = [tensors(each) for each in batches_of(2 * lengths[choros.rank()], 2)]
        distributed = datasets.from_function(lambda context, own=own: own, replicas())
        for _ in range(2):
            parts = []
            for part in distributed:
                ops.allreduce(1, name="the program's own")
                parts.append(hosts(part))
            assert [len(part["y"]) for part in parts] == [2] * len(own) + [0] * (max(lengths) - len(own))
            assert {part["x"].shape[1:] for part in parts} == {(2,)}
        assert datasets.split_batches(distributed, replicas()) is own


def case_batches_smaller_than_the_replicas_are_rejected() -> None:
    for name, kind in KINDS.items():
        with pytest.raises(ConfigError, match="a global batch of 1 examples is smaller than the 2 replicas"):
            list(datasets.distribute(kind(3, 1), replicas()))
        if name not in ("IterDataset", "MapDataset"):
            with pytest.raises(ConfigError, match="smaller than the 2 replicas"):
                list(datasets.split_batches(kind(3, 1), replicas()))


def case_other_objects_than_data_sets_of_batches_are_rejected() -> None:
    for given in (np.zeros(3), (np.zeros(3), np.zeros(3)), {"x": np.zeros(3)}, 3, "text", make(np.zeros(3))):
        with pytest.raises(ConfigError, match="is no data set of batches"):
            datasets.distribute(given, replicas())
    with pytest.raises(ConfigError, match="yields single examples"):
        datasets.distribute(tf.data.Dataset.range(3), replicas())
    with pytest.raises(ConfigError, match="yields single examples"):
        datasets.distribute(torch_data.DataLoader(Examples(3), None), replicas())
    sampled = torch_data.DistributedSampler(Examples(4), 2, 0)
    with pytest.raises(ConfigError, match="has a DistributedSampler"):
        datasets.distribute(torch_data.DataLoader(Examples(4), 2, sampler=sampled), replicas())
    with pytest.raises(ConfigError, match="a batch must be an array"):
        list(datasets.distribute([["a", "b"]], replicas()))


def case_a_collective_out_of_step_is_an_error() -> None:
    distributed = datasets.from_function(lambda context: [np.zeros(2)] * 2, replicas())
    with pytest.raises(MismatchError, match="batches left"):
        ops.allreduce(1, name="mine") if choros.rank() else next(iter(distributed))
    assert isinstance(distributed, LocalBatches)
