"""The examples in docstrings run and have the stated results."""

import doctest
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import choros
from harness import FRAMEWORKS

PACKAGE = Path(choros.__file__).parent


def with_examples(*, keras: bool) -> list[str]:
    """The modules with examples: those that import Keras, or all others."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("choros", *path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text()
        if (parts[1] in ("keras", "training") or "\nimport keras" in text) == keras and ">>> " in text:
            found.append(".".join(parts).removesuffix(".__init__"))
    return found


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    choros.shutdown()


@pytest.mark.parametrize("module", with_examples(keras=False))
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(import_module(module))
    assert not failed
    assert attempted


@pytest.mark.slow
def test_examples_with_keras() -> None:
    script = (
        "import doctest, importlib, sys\n"
        "sys.exit(sum(doctest.testmod(importlib.import_module(name)).failed for name in sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *with_examples(keras=True)]
    environ = {**os.environ, "KERAS_BACKEND": FRAMEWORKS[-1]}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
