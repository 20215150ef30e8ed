"""compat/horovod, installed by pip: its modules are choros' own, and scripts that import them run under horovodrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import FRAMEWORKS, ROOT, TESTS, needs
from ranks.environment import QUICK, python_path
from warm.servers import warm_python

pytestmark = [pytest.mark.slow, needs("hatchling"), needs("pip")]

#: The examples with their arguments, which one job runs one after the other.
EXAMPLES = {
    "torch": [
        "pytorch_mnist",
        "pytorch_mnist --fp16-allreduce",
        "pytorch_mnist --gradient-predivide-factor 2",
        "pytorch_mnist --use-adasum",
        "pytorch_synthetic_benchmark --num-iters 2 --fp16-allreduce",
        "keras_mnist --fp16-allreduce",
    ],
    "tensorflow": ["tensorflow2_mnist", "tensorflow2_synthetic_benchmark --fp16-allreduce", "keras_mnist"],
    "jax": ["keras_mnist"],
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the installed packages, with the command in ``bin``."""
    target = tmp_path_factory.mktemp("installed")
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", target]
    subprocess.run([*command, ROOT / "compat" / "horovod"], check=True, timeout=300)
    return target


def output(installed: Path, *command: object, framework: str = "torch") -> str:
    """The standard output of a command that finds the installed packages; fails if the command does."""
    if framework not in FRAMEWORKS:
        pytest.skip(f"CHOROS_TEST_FRAMEWORKS leaves out {framework}")
    path = os.pathsep.join([str(installed), python_path()])
    environ = {**os.environ, **QUICK, "KERAS_BACKEND": framework, "PYTHONPATH": path}
    done = subprocess.run([*map(str, command)], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def horovodrun(installed: Path) -> list[object]:
    """The beginning of a command for two ranks, with an abbreviated flag."""
    return [installed / "bin" / "horovodrun", "--num-p", 2]


def test_information(installed: Path) -> None:
    command, *_ = horovodrun(installed)
    assert output(installed, command, "--version").startswith("choros ")
    assert "A job can run here" in output(installed, command, "--check-build")


def test_versions(installed: Path) -> None:
    versions = (
        "import importlib.metadata, sys, horovod\n"
        "print(horovod.__version__, importlib.metadata.version('horovod'), {'torch', 'tensorflow'} & {*sys.modules})"
    )
    assert output(installed, sys.executable, "-c", versions) == "0.28.1 0.28.1+choros set()\n"


def test_a_comparison_does_not_take_it_for_horovod(installed: Path) -> None:
    refused = (
        "from choros.bench.contender import Contender, ContenderFailed\n"
        "try:\n    Contender('', print, '', needs=['horovod']).check_installed()\n"
        "except ContenderFailed as error:\n    print(error)\n"
    )
    assert output(installed, sys.executable, "-c", refused) == "not installed (horovod)\n"


@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.program)])
def test_modules(framework: str, installed: Path) -> None:
    assert output(installed, sys.executable, TESTS / "compat" / "modules.py", framework, framework=framework) == ""


@pytest.mark.program
@pytest.mark.parametrize("framework", EXAMPLES)
def test_examples(framework: str, installed: Path) -> None:
    examples = EXAMPLES[framework]
    command = [TESTS / "examples" / "several.py", *" --- ".join(examples).split()]
    printed = output(installed, *horovodrun(installed), *warm_python(framework), *command, framework=framework)
    of_rank_0 = "".join(re.findall(r"^\[0\] (.*\n)", printed, re.MULTILINE))
    found = dict(re.findall(r"^# (.*)\n((?:[^#].*\n)*)", of_rank_0, re.MULTILINE))
    assert list(found) == examples
    for example, lines in found.items():
        check_figures(example, lines)


@pytest.mark.program
@pytest.mark.parametrize(
    ("framework", "example"),
    [
        ("torch", "pytorch_mnist_elastic"),
        pytest.param("tensorflow", "tensorflow2_keras_mnist_elastic", marks=pytest.mark.nightly),
    ],
)
def test_elastic_examples_go_on_when_rank_0_is_killed(framework: str, example: str, installed: Path) -> None:
    launcher = [installed / "bin" / "horovodrun", "-np", 3, "--min-np", 2, "--chaos", "kill:rank=0@step=40"]
    script = ROOT / "compat" / "horovod" / "examples" / f"{example}.py"
    printed = output(installed, *launcher, *warm_python(framework), script, framework=framework)
    assert printed.count("Process 0 of 2 goes on\n") == 1
    check_figures(example, printed)


def check_figures(example: str, lines: str) -> None:
    if "benchmark" in example:
        assert re.search(r"^On 2 [CG]PU\(s\): [\d.]+ \+- [\d.]+ images/s$", lines, re.MULTILINE), lines
    else:
        assert float(re.findall(r"accuracy ([\d.]+)", lines)[-1]) > 0.9, lines
