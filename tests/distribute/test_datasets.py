"""Distributed data sets; the cases on real replicas are in ``dataset_cases.py``."""

import numpy as np
import pytest

from choros.data.rows import Part
from choros.distribute import datasets
from choros.distribute.replicas import Replicas
from harness import FRAMEWORKS, Job, check_case, needs, on

MODULE = "distribute.dataset_cases"
#: The data sets of all frameworks are in these cases; only the arrays in the lists of batches depend on the framework.
FRAMEWORK = FRAMEWORKS[-1]


@needs("tensorflow")
@needs("torch")
@needs("grain")
@on(Job(2, FRAMEWORK), cases=MODULE)
def test_two_replicas(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


class Local(Replicas):
    """Several replicas in one process, with no collectives: these tests need none."""

    run = reduce = gather = all_reduce = all_gather = merge_call = None  # type: ignore[assignment]

    def __init__(self, count: int) -> None:
        self.part = Part(0, count, count)


Local.__abstractmethods__ = frozenset()


def test_local_replicas_share_the_rows_of_a_batch() -> None:
    batches = [np.arange(7), np.arange(2)]
    distributed = [[part.tolist() for part in batch] for batch in datasets.distribute(batches, Local(3))]
    assert distributed == [[[0, 1, 2], [3, 4], [5, 6]], [[0], [1], []]]


def test_each_local_replica_gets_a_batch_from_a_function() -> None:
    own = [np.arange(2), np.arange(3), np.arange(1)]
    distributed = datasets.from_function(lambda context: own, Local(2))
    assert [[part.tolist() for part in step] for step in distributed] == [[[0, 1], [0, 1, 2]], [[0], []]]


def test_fit_on_local_replicas_gets_the_whole_batch() -> None:
    batches = [np.arange(7)]
    assert datasets.split_batches(batches, Local(3)) is batches


@pytest.mark.parametrize(("rows", "count", "local"), [(7, 4, 2), (8, 4, 2), (2, 4, 2), (9, 2, 1), (0, 3, 1)])
def test_parts_cover_all_rows_once(rows: int, count: int, local: int) -> None:
    parts = [Part(first, count, local).range(rows) for first in range(0, count, local)]
    assert [row for start, end in parts for row in range(start, end)] == list(range(rows))


def test_the_fields_of_protobufs_may_have_another_order() -> None:
    one, other, changed = (
        datasets._sample(np.array([row])) for row in (b"\n\x01a\n\x01/", b"\n\x01/\n\x01a", b"\n\x01b\n\x01/")
    )
    np.testing.assert_array_equal(one, other)
    assert (one != changed).any()
