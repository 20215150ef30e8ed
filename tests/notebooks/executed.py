"""The notebooks of ``notebooks/``: runs them, and stores what their cells show.

``python -m notebooks.executed`` in ``tests/`` runs all of them, or those that are named. A digest of the cells in a
notebook's metadata says which cells the stored outputs are of.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from harness import ROOT
from launch.launched import HIDDEN
from parts import FASTEST
from ranks.environment import hiding_path

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
#: The time that a cell may take on a busy machine.
SECONDS = 180


def read(name: str) -> Any:
    """Reads a notebook."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    """The cells of a notebook that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """A number for the code of a notebook."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()


def framework_of(notebook: Any) -> str:
    """The framework that a notebook needs; else the one that is fastest."""
    return "tensorflow" if any("import tensorflow" in cell.source for cell in code_cells(notebook)) else FASTEST


def execute(notebook: Any) -> None:
    """Runs a notebook in its folder, with one framework; an error of a cell is raised."""
    framework = framework_of(notebook)
    environ = {**os.environ, "KERAS_BACKEND": framework, "PYTHONPATH": hiding_path(*HIDDEN[framework])}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        resources={"metadata": {"path": str(FOLDER)}},
        kernel_manager_class=AsyncKernelManager,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=environ)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "choros": {"executed": digest(notebook)},
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        notebook = read(name)
        execute(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
