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
#: What examples import beside choros, and the framework of its package.
NEEDED = {
    "choros.comm.devices": "torch",
    "choros.comm.store": "torch",
    "choros.jax.dependence": "optax",
    "choros.jax.optimizer": "optax",
    "choros.jax.sliced_state": "optax",
}


def with_examples(of: str = "") -> list[str]:
    """The modules with examples: those that import Keras, those of TensorFlow's API, or all others."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("choros", *path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text()
        uses_keras = parts[1] in ("keras", "training") or "import keras" in text
        group = "tensorflow" if parts[1] == "tensorflow" else "keras" if uses_keras else ""
        if group == of and ">>> " in text:
            found.append(".".join(parts).removesuffix(".__init__"))
    return found


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    choros.shutdown()


@pytest.mark.parametrize("module", with_examples())
def test_examples(module: str) -> None:
    for needed in {module.split(".")[1], NEEDED.get(module)} & {"torch", "jax", "optax", "ray", "spark"}:
        pytest.importorskip({"spark": "pyspark"}.get(needed, needed))
    failed, attempted = doctest.testmod(import_module(module))
    assert not failed
    assert attempted


@pytest.mark.slow
@pytest.mark.parametrize("of", ["keras", "tensorflow"])
def test_examples_with_keras(of: str) -> None:
    if of == "tensorflow" and of not in FRAMEWORKS:
        pytest.skip("CHOROS_TEST_FRAMEWORKS leaves out tensorflow")
    script = (
        "import doctest, importlib, sys\n"
        "sys.exit(sum(doctest.testmod(importlib.import_module(name)).failed for name in sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *with_examples(of)]
    environ = {**os.environ, "KERAS_BACKEND": of if of in FRAMEWORKS else FRAMEWORKS[-1]}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
