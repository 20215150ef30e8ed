import numpy as np
import pytest

from choros.data.rows import Part, check_global_batch, example_indices
from choros.errors import ConfigError

#: Examples, global batch size, ranks: even, uneven last batch, batches that ranks do not divide, fewer than ranks.
CASES = [(16, 8, 2), (18, 8, 2), (17, 8, 3), (20, 7, 3), (7, 7, 4), (2, 8, 4), (1, 4, 4), (0, 4, 2), (5, 1, 1)]


def indices_of_all(n: int, batch_size: int, size: int) -> list[list[int]]:
    indices = [example_indices(n, batch_size, Part(rank, size)) for rank in range(size)]
    assert all(own.dtype == np.int64 for own in indices)
    return [own.tolist() for own in indices]


@pytest.mark.parametrize(("n", "batch_size", "size"), CASES)
def test_batches_of_all_ranks_are_the_batches_of_one_process(n: int, batch_size: int, size: int) -> None:
    indices = indices_of_all(n, batch_size, size)
    batches = [[i for own in indices for i in own if i // batch_size == step] for step in range(-(-n // batch_size))]
    assert batches == [list(range(first, min(first + batch_size, n))) for first in range(0, n, batch_size)]


@pytest.mark.parametrize(("n", "batch_size", "size"), CASES)
def test_ranks_have_an_example_in_every_batch_except_possibly_the_last(n: int, batch_size: int, size: int) -> None:
    for own in indices_of_all(n, batch_size, size):
        assert {i // batch_size for i in own} >= set(range(-(-n // batch_size) - 1))


@pytest.mark.parametrize(("n", "batch_size", "size"), CASES)
def test_indices_are_in_order_and_cover_all_examples_once(n: int, batch_size: int, size: int) -> None:
    indices = indices_of_all(n, batch_size, size)
    assert all(own == sorted(own) for own in indices)
    assert sorted(i for own in indices for i in own) == list(range(n))


def test_batch_with_fewer_examples_than_ranks_is_an_error() -> None:
    check_global_batch(2, 2)
    for call in (lambda: check_global_batch(2, 3), lambda: example_indices(9, 2, Part(0, 3))):
        with pytest.raises(ConfigError, match=r"a global batch of 2 examples is smaller than the 3 replicas"):
            call()
