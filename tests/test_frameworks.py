"""The framework with which Keras computes, where only one is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from choros import frameworks
from harness import needs

#: Other frameworks cannot be found, as if they were not installed.
HIDE = "import sys; sys.modules.update(dict.fromkeys({others!r}));"


def run(code: str, *others: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    command = [sys.executable, "-c", HIDE.format(others=others) + code]
    return subprocess.run(command, env={**clean, **environ}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@needs("torch")
@pytest.mark.parametrize("module", ["choros.keras", "choros.distribute"])
def test_the_only_framework_is_the_one(module: str) -> None:
    done = run(f"import {module}, keras; print(keras.backend.backend())", "tensorflow", "jax")
    assert done.stdout == "torch\n", done.stderr


@pytest.mark.slow
def test_a_missing_framework_is_one_sentence() -> None:
    several = run("import choros.keras", "tensorflow")
    assert several.stderr.endswith(
        "ImportError: Keras computes with tensorflow, which is not installed: set KERAS_BACKEND to torch or jax before "
        "the script starts.\n"
    )
    chosen = run(
        "from choros import distribute; distribute.MirroredStrategy()", "tensorflow", KERAS_BACKEND="tensorflow"
    )
    assert "ConfigError: Keras computes with tensorflow, which is not installed" in chosen.stderr
    assert several.stderr.count("Traceback") == chosen.stderr.count("Traceback") == 1
    no_framework = run("import choros.keras", "tensorflow", "torch", "jax")
    assert "pip install 'choros[tensorflow]', 'choros[torch]' or 'choros[jax]'" in no_framework.stderr


def test_ranks_get_it_from_chorosrun_if_they_run_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PATH": str(Path(sys.executable).parent)}
    monkeypatch.setattr(frameworks, "installed", lambda: ["jax"])
    for program in (sys.executable, Path(sys.executable).name):
        assert frameworks.keras_backend_of_ranks([program, "train.py"], environ) == {"KERAS_BACKEND": "jax"}
    assert frameworks.keras_backend_of_ranks(["/bin/sh", "train.sh"], environ) == {}
    assert frameworks.keras_backend_of_ranks(["missing"], environ) == {}
    assert frameworks.keras_backend_of_ranks([sys.executable], {**environ, "KERAS_BACKEND": "torch"}) == {}
    monkeypatch.setattr(frameworks, "installed", lambda: ["jax", "torch"])
    assert frameworks.keras_backend_of_ranks([sys.executable], environ) == {}


def test_chorosrun_passes_it_on() -> None:
    hide = "import choros.frameworks as f; f.installed = lambda: ['jax']; from choros.launch.cli import main; main()"
    code = f"import sys; sys.argv = ['chorosrun', '-np', '1', sys.executable, '-c', {PRINT!r}]; {hide}"
    done = run(code)
    assert "jax" in done.stdout, done


PRINT = "import os; print(os.environ['KERAS_BACKEND'])"
