"""Tries a wheel of choros in new environments: ``make test-versions``.

    python -m versions.run [--tensorflow tensorflow-cpu] [WORD …]

Without words, in each environment of ``combinations.py``: the quickstart on two ranks, and the quick part of the suite.
Words choose: ``3.13 jax newest``, or ``3.11 3.12 quickstart``. One environment is made, used and removed after the
other; pip's own settings choose what it installs, such as builds without CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from packaging.requirements import Requirement

from docs.programs import DOCS, blocks
from harness import FRAMEWORKS, ROOT
from versions.combinations import Combination, Step, chosen, combinations, steps

#: Where the output of each combination is.
LOGS = ROOT / "build" / "versions"
#: Environment variables that do not reach the programs that are tried.
OUR_OWN = ("KERAS_BACKEND", "PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Result:
    """What came of a combination.

    Attributes:
        failed: the name of the step that did; empty if none.
        versions: of the framework and Keras.
        tests: how many passed.
        seconds: from the environment's creation to its removal.
    """

    failed: str
    versions: str
    tests: str
    seconds: float

    def __str__(self) -> str:
        outcome = f"FAILED in {self.failed}" if self.failed else "passed"
        return ", ".join(filter(None, [outcome, self.versions, self.tests, f"{self.seconds:.0f} s"]))


def interpreters(pythons: Sequence[str]) -> dict[str, Path]:
    """The Pythons that are found, in PATH or among pyenv's, and can make environments."""
    found = {}
    for python in pythons:
        folders = [*os.environ["PATH"].split(os.pathsep), *_pyenv(python)]
        candidates = [Path(folder) / f"python{python}" for folder in folders]
        runs = (each for each in candidates if each.exists() and _can_make_environments(each))
        if (path := next(runs, None)) is not None:
            found[python] = path
    return found


def _pyenv(python: str) -> Iterator[Path]:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return (path / "bin" for path in sorted((root / "versions").glob(f"{python}.*"), reverse=True))


def _can_make_environments(python: Path) -> bool:
    """pyenv's commands are there also for versions that are not in use, and Debian's Python may lack ensurepip."""
    return not subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode


def releases(interpreter: Path, package: str) -> list[str]:
    """The releases of a package that pip can install on this Python."""
    command = [sys.executable, "-m", "pip", "--python", interpreter, "index", "versions", package, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300)
    return json.loads(done.stdout)["versions"]


def wheel_of(checkout: Path, folder: Path) -> Path:
    """Builds the wheel, with the hatchling of this environment."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*command, checkout], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


def tried(combination: Combination, parts: Sequence[str], wheel: Path, interpreter: Path) -> Result:
    """Runs the steps of a combination up to the first that fails."""
    began = time.monotonic()
    log = LOGS / f"{combination}.log"
    home = Path(tempfile.mkdtemp(prefix="choros-versions-"))
    try:
        _, write, start = (code for _, code in blocks((DOCS / "quickstart.md").read_text(), "bash"))
        (home / "quickstart.sh").write_text(write + start)
        with log.open("w") as output:
            planned = steps(combination, parts, wheel, interpreter, home, ROOT)
            failed = next((step.name for step in planned if not _succeeds(step, home, output)), "")
        text = log.read_text()
        return Result(failed, _installed(text, combination), _tests(text), time.monotonic() - began)
    finally:
        shutil.rmtree(home)


def _succeeds(step: Step, home: Path, output: TextIO) -> bool:
    print(f"\n== {step.name}: {' '.join(step.argv)}", file=output, flush=True)
    environ = {name: value for name, value in os.environ.items() if name not in OUR_OWN}
    environ["PATH"] = os.pathsep.join([str(home / "env" / "bin"), environ["PATH"]])
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    try:
        done = subprocess.run(
            step.argv, cwd=step.folder, env={**environ, **step.environ}, timeout=step.seconds, **streams
        )
    except subprocess.TimeoutExpired:
        print(f"\nran for more than {step.seconds} s", file=output)
        return False
    return done.returncode == 0


def _installed(text: str, combination: Combination) -> str:
    """The releases that pip says that it has installed."""
    names = f"keras|{combination.extra}"
    found = re.findall(rf" ({names})-(\d\S*)", "".join(re.findall(r"^Successfully installed.*", text, re.MULTILINE)))
    return ", ".join(f"{name} {release}" for name, release in found)


def _tests(text: str) -> str:
    """The last line of pytest."""
    found = re.findall(r"^(?:\d+ \w+,? )+(?=in \d)", text, re.MULTILINE)
    return found[-1].strip() if found else ""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", default="tensorflow", help="the extra with TensorFlow")
    parser.add_argument("words", nargs="*", metavar="WORD", help="what to try")
    arguments = parser.parse_args(argv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    frameworks = {name: arguments.tensorflow if name == "tensorflow" else name for name in FRAMEWORKS}
    packages = {Requirement(each).name for extra in frameworks.values() for each in extras[extra]}
    pythons = [each.split()[-1] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    found = interpreters(pythons)
    print(f"Pythons: {', '.join(map(str, found.values()))}; not found: {' '.join({*pythons} - {*found}) or 'none'}")
    admitted = {python: {name: releases(path, name) for name in packages} for python, path in found.items()}
    try:
        planned, parts = chosen(combinations(extras, frameworks, admitted), arguments.words)
    except ValueError as error:
        parser.error(str(error))
    LOGS.mkdir(parents=True, exist_ok=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="choros-wheel-") as folder:
        wheel = wheel_of(ROOT, Path(folder))
        for each in planned:
            print(f"{each}: {' and '.join(parts)} …", flush=True)
            results[each] = tried(each, parts, wheel, found[each.python])
            print(f"{each}: {results[each]}", flush=True)
    failed = [each for each, result in results.items() if result.failed]
    print("", *(f"{each!s:24} {result}" for each, result in results.items()), sep="\n")
    if failed:
        sys.exit(f"{len(failed)} of {len(results)} failed; what they printed: {LOGS}")


if __name__ == "__main__":
    main()
