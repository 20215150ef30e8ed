"""The plan of ``make test-versions``, and the wheel that it tries."""

import re
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from harness import ROOT, needs
from versions.combinations import Combination, chosen, combinations, oldest_pins, steps
from versions.run import wheel_of

EXTRAS = {"torch": ["keras>=3.15", "torch>=2.6"], "jax": ["keras>=3.15", "jax>=0.8"], "bench": ["rich>=13"]}
RELEASES = {
    "3.11": {"keras": ["3.15.1", "3.15.0", "3.9.2"], "torch": ["2.13.0", "2.6.0", "2.5.1"], "jax": ["0.10.2", "0.8.0"]},
    "3.14": {"keras": ["3.15.1"], "torch": ["2.13.0"], "jax": ["0.12.0.1", "0.8.0"]},
}
ALL = combinations(EXTRAS, {"torch": "torch", "jax": "jax"}, RELEASES)


def test_each_python_has_the_oldest_and_the_newest_of_each_framework() -> None:
    assert list(ALL) == [
        Combination("3.11", "torch", "oldest", "torch", ("keras==3.15.0", "torch==2.6.0")),
        Combination("3.11", "torch", "newest", "torch"),
        Combination("3.11", "jax", "oldest", "jax", ("keras==3.15.0", "jax==0.8.0")),
        Combination("3.11", "jax", "newest", "jax"),
        Combination("3.14", "torch", "oldest", "torch", ("keras==3.15.1", "torch==2.13.0")),
        Combination("3.14", "torch", "newest", "torch"),
        Combination("3.14", "jax", "oldest", "jax", ("keras==3.15.1", "jax==0.8.0")),
        Combination("3.14", "jax", "newest", "jax"),
    ]


def test_the_oldest_release_is_the_smallest_number_that_is_admitted() -> None:
    assert oldest_pins(["jax>=0.8"], {"jax": ["0.10.2", "0.9.0", "0.7.2"]}) == ("jax==0.9.0",)


@pytest.mark.parametrize(
    ("words", "names", "parts"),
    [
        ("3.11 jax newest", ["3.11 jax newest"], ["quickstart", "suite"]),
        ("oldest 3.14", ["3.14 torch oldest", "3.14 jax oldest"], ["quickstart", "suite"]),
        ("3.11 3.14 jax oldest suite", ["3.11 jax oldest", "3.14 jax oldest"], ["suite"]),
        ("quickstart", [*map(str, ALL)], ["quickstart"]),
        ("", [*map(str, ALL)], ["quickstart", "suite"]),
    ],
)
def test_words_choose(words: str, names: list[str], parts: list[str]) -> None:
    found, run = chosen(ALL, words.split())
    assert ([*map(str, found)], run) == (names, parts)


def test_a_word_that_names_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^3\.12 tf: there is 3\.11 3\.14 jax newest oldest quickstart suite torch$"):
        chosen(ALL, ["3.12", "tf", "newest"])


def test_the_quickstart_runs_before_the_tools_of_tests_are_installed() -> None:
    planned = steps(ALL[2], ["quickstart", "suite"], Path("/w/c.whl"), Path("/usr/bin/python3.11"), Path("/h"), ROOT)
    assert [step.name for step in planned] == [
        *("environment", "install", "pip check", "chorosrun --help", "choros bench --help", "chorosrun --check-build"),
        *("quickstart", "install tools", "the wheel is tested", "suite"),
    ]
    assert planned[0].argv == ("/usr/bin/python3.11", "-m", "venv", "/h/env")
    assert planned[1].argv[-4:] == ("install", "/w/c.whl[jax]", "keras==3.15.0", "jax==0.8.0")
    assert planned[7].argv[-4:] == ("install", "/w/c.whl[jax,test,jax-test]", "keras==3.15.0", "jax==0.8.0")
    assert planned[-1].environ == {"CHOROS_TEST_FRAMEWORKS": "jax"}
    assert {step.folder for step in planned[:8]} == {Path("/h")}


@pytest.mark.slow
@needs("hatchling")
def test_the_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_of(ROOT, tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        others = {name.partition(".dist-info/")[2]: wheel.read(name) for name in wheel.namelist() if name not in names}
    source = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {str(path.relative_to(ROOT / "src")) for path in source}
    assert "choros/py.typed" in names
    assert others["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert others["entry_points.txt"].split() == (
        b"[console_scripts] choros = choros.cli:main chorosrun = choros.launch.cli:main".split()
    )
    metadata = message_from_bytes(others["METADATA"])
    assert [metadata[name] for name in ("Name", "License-Expression", "Requires-Python")] == [
        *("choros", "Apache-2.0", ">=3.11")
    ]
    said = metadata.get_payload(decode=True).decode()
    assert said.splitlines()[0] == (ROOT / "README.md").read_text().splitlines()[0]
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", said) == []  # what is relative leads nowhere there
    assert "docs/training.md" in said
    assert ".svg" not in said
