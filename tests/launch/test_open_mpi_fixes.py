"""The fix for Open MPI's number of ranks on a host."""

import pytest

from choros.launch.wrapper.wrapper import repairs
from choros.topology import detect


def reported(rank, local_rank, local_size, size=3):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


@pytest.mark.parametrize(
    ("environ", "counts", "local_size"),
    [
        (reported(0, 0, 1), (2, 1), 2),
        (reported(1, 1, 1), (2, 1), 2),
        (reported(2, 0, 2), (2, 1), 1),
        (reported(1, 1, 1), (), 2),  # not known: at least local_rank + 1
        (reported(2, 1, 2), (2, 1), 2),  # assigned in another way
        (reported(0, 0, 3), (3,), 3),
    ],
)
def test_local_size(environ, counts, local_size):
    assert detect({**environ, **repairs(environ, counts)}).local_size == local_size


def test_other_launchers_are_unchanged():
    assert repairs({"PMI_RANK": "0", "PMI_SIZE": "2"}, (2, 1)) == {}
