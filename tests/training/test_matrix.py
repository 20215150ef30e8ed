"""The selection of the transparency matrix: its cells on PyTorch, on two ranks, and some of TensorFlow's."""

import itertools

import pytest

from harness import Job, case_names, check_case, on
from training.matrix import CELLS, DIMENSIONS, covering

MODULE = "training.matrix_cases"


@on(Job(2, "torch"))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_every_pair_of_values(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(Job(2, "tensorflow"))
def test_loops_of_tensorflow_keep_the_order_of_calls(job: Job) -> None:
    check_case(MODULE, "case_second_part", job)


@pytest.mark.parametrize("pair", list(itertools.combinations(DIMENSIONS, 2)), ids="-".join)
def test_selection_has_every_pair_that_occurs(pair: tuple[str, str]) -> None:
    of = lambda cells: {(getattr(cell, pair[0]), getattr(cell, pair[1])) for cell in cells}  # noqa: E731
    assert of(covering(CELLS)) == of(CELLS)
