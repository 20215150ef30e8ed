from __future__ import annotations

import re

import numpy as np
import pytest

from choros.distribute.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
from choros.errors import ConfigError
from choros.parameter_server.placement import Shard, join, place, split

SHAPES = [(7,), (10, 3), (1, 5), (300, 200), (5, 100_000)]


@pytest.mark.parametrize(
    ("partitioner", "expected"),
    [
        (FixedShardsPartitioner(3), [[3], [3, 1], [1, 1], [3, 1], [3, 1]]),
        (MinSizePartitioner(), [[1], [1, 1], [1, 1], [1, 1], [1, 1]]),
        (MinSizePartitioner(100_000, max_shards=10), [[1], [1, 1], [1, 1], [3, 1], [5, 1]]),
        (MaxSizePartitioner(60), [[1], [2, 1], [1, 1], [300, 1], [5, 1]]),
        (MaxSizePartitioner(60, max_shards=2), [[1], [2, 1], [1, 1], [2, 1], [2, 1]]),
        (MaxSizePartitioner(100_000), [[1], [1, 1], [1, 1], [3, 1], [5, 1]]),
    ],
)
def test_shards_equal_those_of_tensorflow(partitioner, expected):
    assert [partitioner(shape, "float32") for shape in SHAPES] == expected


def test_the_element_size_counts():
    assert MinSizePartitioner(4, max_shards=8)((4,), "float64") == [4]
    assert MinSizePartitioner(4, max_shards=8)((4,), np.float16) == [2]
    assert MinSizePartitioner(4, max_shards=8)((4,), "bfloat16") == [2]


@pytest.mark.parametrize("make", [FixedShardsPartitioner, MinSizePartitioner, MaxSizePartitioner])
def test_a_size_below_one_is_an_error(make):
    with pytest.raises(ConfigError, match="at least 1"):
        make(0)


def test_a_missing_axis_is_an_error():
    with pytest.raises(ConfigError, match=re.escape("shape (3,) cannot be sharded along axis 1")):
        FixedShardsPartitioner(2)((3,), "float32", axis=1)


def test_shards_are_assigned_round_robin():
    variables = {(1, 0): ((5, 2), "float32"), (1, 1): ((), "float32"), (1, 2): ((2,), "float32")}
    assert place(variables, FixedShardsPartitioner(2), servers=2, first=1) == {
        (1, 0): ((1, Shard((1, 0), 0, 3)), (0, Shard((1, 0), 3, 5))),
        (1, 1): ((1, Shard((1, 1))),),
        (1, 2): ((0, Shard((1, 2), 0, 1)), (1, Shard((1, 2), 1, 2))),
    }


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("partitioner", [None, FixedShardsPartitioner(3), MaxSizePartitioner(16)])
def test_joining_the_shards_restores_the_values(partitioner, servers):
    values = {
        (0, i): np.random.default_rng(i).normal(size=shape) for i, shape in enumerate([(7, 3), (), (2,), (4, 1, 2)])
    }
    placement = place({key: (value.shape, "float64") for key, value in values.items()}, partitioner, servers)
    parts = split(values, placement)
    assert parts.keys() <= set(range(servers))
    received = {shard: value for part in parts.values() for shard, value in part.items()}
    assert len(received) == sum(map(len, parts.values()))
    for key, value in values.items():
        np.testing.assert_array_equal(join(key, placement, received), value)
    assert len(split({(0, 1): values[0, 1]}, placement)) == 1


@pytest.mark.parametrize("given", [[2, 2], [3], [0, 1], [4, 1]])
def test_an_invalid_result_of_a_partitioner_is_an_error(given):
    with pytest.raises(ConfigError, match=re.escape(f"returned {given} for a variable of shape (3, 2)")):
        place({(0, 0): ((3, 2), "float32")}, lambda shape, dtype: given, servers=2)
