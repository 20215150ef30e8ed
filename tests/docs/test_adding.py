"""What docs/design/adding.md adds works: each change is applied to a copy of the source, and its program runs there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import CHOROSRUN, ROOT, needs
from ranks.environment import hiding_path

PAGE = ROOT / "docs" / "design" / "adding.md"


@dataclass(frozen=True)
class Addition:
    """A section of the page: a change, and the command and program that use it."""

    title: str
    change: str
    command: str
    program: str

    @property
    def new(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)$", "".join(re.findall(r"^--- /dev/null\n.*\n", self.change, re.M)), re.M)

    @property
    def edited(self) -> list[str]:
        return [each for each in re.findall(r"^\+\+\+ b/(\S+)$", self.change, re.M) if each not in self.new]


def additions() -> list[Addition]:
    found = []
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S):
        blocks = dict(re.findall(r"^```(diff|bash|python)\n(.*?)^```$", text, re.M | re.S))
        found.append(Addition(title, blocks["diff"], blocks["bash"].strip(), blocks["python"]))
    return found


@pytest.mark.parametrize("addition", additions(), ids=lambda each: each.title)
def test_an_addition_is_one_new_file_and_at_most_two_edits(addition: Addition) -> None:
    assert len(addition.new) <= 1
    assert len(addition.edited) <= 2


@pytest.mark.slow
@needs("torch")
@pytest.mark.parametrize("addition", additions(), ids=lambda each: each.title)
def test_an_addition_works(addition: Addition, tmp_path: Path) -> None:
    unfinished = shutil.ignore_patterns("*.pyc.[0-9]*")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=unfinished)  # with what is compiled
    subprocess.run(["git", "apply", "-C1", "-"], cwd=tmp_path, input=addition.change, text=True, check=True, timeout=60)
    (tmp_path / "train.py").write_text(addition.program)
    path = os.pathsep.join([str(tmp_path / "src"), hiding_path("tensorflow", "jax")])
    environ = {**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "torch"}
    command = addition.command.replace("chorosrun", str(CHOROSRUN)).replace("python ", f"{sys.executable} ")
    done = subprocess.run(
        ["sh", "-ec", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
