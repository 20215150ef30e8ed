import pytest

from choros.errors import ConfigError
from choros.topology import shard_range


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 2, 6, 7, 8, 100])
def test_ranges_are_consecutive_cover_all_indices_and_differ_by_one_at_most(n: int, size: int) -> None:
    ranges = [shard_range(n, rank, size) for rank in range(size)]
    assert [index for start, end in ranges for index in range(start, end)] == list(range(n))
    assert [end - start for start, end in ranges] == [n // size + (rank < n % size) for rank in range(size)]


@pytest.mark.parametrize(("n", "rank", "size"), [(-1, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0), (5.5, 0, 2)])
def test_invalid_arguments_are_an_error(n: float, rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"n={n}, rank={rank}, size={size}"):
        shard_range(n, rank, size)
