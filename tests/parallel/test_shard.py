import numpy as np
import pytest

from choros.data.rows import batch_ranges, check_batch_size, example_indices
from choros.errors import ConfigError

#: Examples, global batch size, ranks: even, uneven last batch, batches that ranks do not divide, fewer than ranks.
CASES = [(16, 8, 2), (18, 8, 2), (17, 8, 3), (20, 7, 3), (7, 7, 4), (2, 8, 4), (1, 4, 4), (0, 4, 2), (5, 1, 1)]


@pytest.mark.parametrize(("n", "batch_size", "size"), CASES)
def test_batches_of_all_ranks_are_the_batches_of_one_process(n: int, batch_size: int, size: int) -> None:
    ranges = [batch_ranges(n, batch_size, rank, size) for rank in range(size)]
    steps = -(-n // batch_size)
    batches = []
    for step in range(steps):
        parts = [own[step] for own in ranges if step < len(own)]
        batches.append([index for start, end in parts for index in range(start, end)])
    assert batches == [list(range(first, min(first + batch_size, n))) for first in range(0, n, batch_size)]


@pytest.mark.parametrize(("n", "batch_size", "size"), CASES)
def test_ranks_have_an_example_in_every_batch_except_possibly_the_last(n: int, batch_size: int, size: int) -> None:
    steps = -(-n // batch_size)
    for rank in range(size):
        ranges = batch_ranges(n, batch_size, rank, size)
        assert len(ranges) in (steps, steps - 1)
        assert all(start < end for start, end in ranges)


@pytest.mark.parametrize(("n", "batch_size", "size"), CASES)
def test_indices_are_the_concatenated_ranges(n: int, batch_size: int, size: int) -> None:
    indices = [example_indices(n, batch_size, rank, size) for rank in range(size)]
    for rank, own in enumerate(indices):
        assert own.dtype == np.int64
        assert own.tolist() == [i for start, end in batch_ranges(n, batch_size, rank, size) for i in range(start, end)]
    assert sorted(np.concatenate(indices)) == list(range(n))


def test_batch_with_fewer_examples_than_ranks_is_an_error() -> None:
    check_batch_size(2, 2)
    for call in (lambda: check_batch_size(2, 3), lambda: batch_ranges(9, 2, 0, 3)):
        with pytest.raises(ConfigError, match=r"batch_size=2 .* of all 3 ranks together: it must be at least 3"):
            call()
