"""The examples of the documentation: Python code runs on two ranks, the quickstart as written; commands are parsed."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from choros.cli import choros
from choros.launch.cli import chorosrun
from docs.programs import DOCS, NOT_RUN, PROGRAMS, blocks, on
from harness import FRAMEWORKS, ROOT, Job, check_case
from ranks.environment import hiding_path
from ranks.job import unwanted

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
RUNS = [(program.page, Job(2, framework)) for program in PROGRAMS for framework in program.frameworks]

#: Commands of shell examples that are not tested here, by their first words, and why.
NOT_PARSED = {
    "srun": "needs SLURM",
    "sbatch": "needs SLURM",
    "salloc": "needs SLURM",
    "scancel": "needs SLURM",
    "torchrun": "tests/topology and tests/comm start ranks by it",
    "make": "of this repository: .ci/run calls it",
    "python3 -m venv": "installs from an index; test_the_extras_exist reads what it installs",
    "pip": "likewise",
    "cat": "test_quickstart runs it",
    "export": "sets a variable",
    "umask": "says who may read new files",
    "for": "a loop around a command that is on the page, too",
    "python": "what starts ranks without chorosrun: tests/topology",
    "ssh": "needs another host",
    "cp ": "needs the repository",
    "kubectl": "needs a cluster of Kubernetes: tests/deploy",
    "podman": "needs a registry of images",
    "sky": "needs an account with a cloud",
    "nvidia-smi": "needs a GPU",
}


@pytest.mark.parametrize(("page", "job"), RUNS, ids=str)
def test_python_on_two_ranks(page: str, job: Job) -> None:
    check_case("docs.page_cases", f"case_page[{page}]", job)


@pytest.mark.parametrize("page", PAGES)
def test_python_is_run_or_has_a_reason(page: str) -> None:
    known = {program.page for program in PROGRAMS} | set(NOT_RUN)
    excluded = {f"{program.page}#{heading}" for program in PROGRAMS for heading in program.without}
    assert page in known or not blocks((DOCS / page).read_text()), "add it to tests/docs/programs.py"
    assert excluded <= set(NOT_RUN)


def commands(page: str) -> list[str]:
    """The command lines of a page's shell examples, without variables, comments and prompts."""
    text = (DOCS / page).read_text()
    lines = "".join(code for _, code in blocks(text, "bash")).splitlines()
    lines = [line for line in re.sub(r"<< 'EOF'\n.*?EOF", "", "\n".join(lines), flags=re.DOTALL).splitlines() if line]
    found = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [re.sub(r"^((?:'?\w+=\S*) )+", "", re.sub(r"^'?\w+=.*?}}' ", "", line)) for line in found if line]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str) -> None:
    for command in commands(page):
        argv = shlex.split(command)
        if argv[0] in ("chorosrun", "horovodrun"):  # the second is the first, by another name
            done = CliRunner().invoke(chorosrun, ["--dry-run", *argv[1:]])
            assert done.exit_code == 0, f"{command}\n{done.output}"
        elif argv[0] == "choros":
            assert argv[1] in choros.list_commands(click.Context(choros)), command
        else:
            assert [start for start in NOT_PARSED if command.startswith(start)], f"how is it tested? {command}"


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../examples/README.md"])
def test_the_extras_exist(page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"(?:choros|'\.)\[([\w,-]+)\]", (DOCS / page).read_text())
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    """The second and the third command, in the environment of the tests, which the first would make."""
    install, write, start = (code for _, code in blocks((DOCS / "quickstart.md").read_text(), "bash"))
    assert install.startswith("python3 -m venv env && . env/bin/activate && pip install 'choros[jax]'")
    environ = {**os.environ, "KERAS_BACKEND": FRAMEWORKS[-1]}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    argv = ["sh", "-ec", write + start]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = re.findall(r"process ([01]) of 2: accuracy (0\.\d+)", done.stdout)
    assert sorted(rank for rank, _ in accuracies) == ["0", "1"]
    assert len({accuracy for _, accuracy in accuracies}) == 1
    assert float(accuracies[0][1]) > 0.9


def in_one_process(code: str, tmp_path: Path, framework: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    environ = {**os.environ, "KERAS_BACKEND": framework, "PYTHONPATH": hiding_path(*unwanted(framework))}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="CHOROS_TEST_FRAMEWORKS leaves out torch")
def test_functions_in_a_job(tmp_path: Path) -> None:
    """``choros.run`` starts ranks that import the function's module."""
    code = "\n".join(code for _, code in blocks((DOCS / "chorosrun.md").read_text()))
    in_one_process(code, tmp_path, "torch")


@pytest.mark.xdist_group("ports of the page")
@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_cluster_in_one_process(framework: str, tmp_path: Path) -> None:
    """The servers and workers of the page about parameter servers that are threads of one process."""
    parts = [code for heading, code in blocks((DOCS / "distribute.md").read_text()) if heading == "Parameter servers"]
    cluster = next(index for index, code in enumerate(parts) if "distribute.Server(" in code)
    in_one_process("\n".join(on(framework, parts[cluster:])), tmp_path, framework)
