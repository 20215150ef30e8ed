"""The notebooks of ``notebooks/`` run, and what they store is what their cells have shown."""

from __future__ import annotations

import json

import pytest

from harness import FRAMEWORKS, ROOT
from notebooks.executed import NOTEBOOKS, code_cells, digest, execute, framework_of, read

#: The framework of each notebook is looked up when tests are collected: one that is left out leaves out its notebook.
RUNNABLE = [name for name in NOTEBOOKS if framework_of(read(name)) in FRAMEWORKS]


def shown(notebook: object) -> list[dict[str, object]]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_it_runs(name: str) -> None:
    notebook = read(name)
    execute(notebook)  # an error of a cell is raised
    errors = [str(output["text"]) for output in shown(notebook) if output.get("name") == "stderr"]
    assert not [text for text in errors if "Warning" in text]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_those_of_the_cells(name: str) -> None:
    notebook = read(name)
    advice = f"run it again: cd tests && python -m notebooks.executed {name}"
    assert notebook.metadata["choros"]["executed"] == digest(notebook), advice
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), advice
    assert not [output for output in shown(notebook) if output["output_type"] == "error"]
    assert str(ROOT) not in json.dumps(notebook), "paths of one machine"


def test_there_is_one_for_each_lesson() -> None:
    assert len(NOTEBOOKS) == 4
