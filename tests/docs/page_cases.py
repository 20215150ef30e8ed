"""The Python code of each page, on ranks."""

from __future__ import annotations

import keras

from docs.programs import PROGRAMS, run


def _run(page: str) -> None:
    framework = keras.backend.backend()
    (program,) = (each for each in PROGRAMS if each.page == page)
    run(program, framework)


def case_distribute():
    _run("distribute.md")


def case_faces():
    _run("faces.md")


def case_index():
    _run("index.md")


def case_performance():
    _run("performance.md")


def case_torch():
    _run("torch.md")


def case_training():
    _run("training.md")


def case_compression():
    _run("compression.md")


def case_shard_state():
    _run("shard-state.md")


def case_timeline():
    _run("timeline.md")


def case_tensorflow():
    _run("tensorflow.md")
