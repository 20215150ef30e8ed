"""The transparency matrix: the page, and a selection of its cells, on PyTorch, and of loops on TensorFlow."""

import itertools
from collections.abc import Iterable

import pytest

from harness import Job, check_case, on
from training.matrix import BOUND, DIMENSIONS, Cell, covering
from training.matrix_results import PAGE, PARTS, Part, Results, page

MODULE = "training.matrix_cases"


@on(Job(2, "torch"), cases=MODULE)
def test_every_pair_of_values(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.nightly
@on(Job(2, "tensorflow"))
def test_loops_of_tensorflow_keep_the_order_of_calls(job: Job) -> None:
    check_case(MODULE, "case_loop", job)


PAIRS = list(itertools.combinations(DIMENSIONS, 2))


def values(cells: Iterable[Cell], pair: tuple[str, str]) -> set[tuple[object, object]]:
    return {(getattr(cell, pair[0]), getattr(cell, pair[1])) for cell in cells}


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_selection_has_every_pair_that_occurs(part: Part) -> None:
    assert [pair for pair in PAIRS if values(covering(part.cells), pair) != values(part.cells, pair)] == []


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_results_are_within_the_bound_and_have_every_pair_that_occurs(part: Part) -> None:
    differences = Results.read(part).differences
    assert {cell: found for cell, found in differences.items() if max(found) > BOUND} == {}
    assert [pair for pair in PAIRS if values(differences, pair) != values(part.cells, pair)] == []


def test_the_page_has_these_results() -> None:
    assert PAGE.read_text() == page({part: Results.read(part) for part in PARTS}), "make matrix writes it"
