"""The Python code of each page, on ranks."""

import keras
import pytest

from docs.programs import PROGRAMS, Program, run


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.page)
def case_page(program: Program) -> None:
    run(program, keras.backend.backend())
