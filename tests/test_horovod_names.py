"""The names and signatures of Horovod's APIs are those of Horovod 0.28.1, as in the tables ``horovod_names/*.toml``."""

import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from harness import FRAMEWORKS, TESTS, skip_if_left_out


def tables() -> dict[str, list[Path]]:
    """Returns the tables of each package, such as ``choros.keras``, and of what is in it."""
    found = defaultdict(list)
    for path in sorted((TESTS / "horovod_names").glob("*.toml")):
        face = tomllib.loads(path.read_text())["face"]
        found[".".join(face.split(".")[:2])].append(path)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("face", tables())
def test_names_and_signatures(face: str) -> None:
    own = face.removeprefix("choros.")
    framework = own if own in ("torch", "tensorflow", "jax") else FRAMEWORKS[-1]
    skip_if_left_out(framework)
    environ = {**os.environ, "KERAS_BACKEND": framework}
    command = [sys.executable, TESTS / "horovod_names" / "compare.py", *tables()[face]]
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.stdout.splitlines() == []
