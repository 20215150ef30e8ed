"""Files, folders and modules that docstrings, comments and documents name exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ROOT

#: A path with a folder, anywhere; a file or folder alone, in backticks. A colon and a class may follow.
PATH = re.compile(
    r"(?<![\w/.~$<-])(?:[\w-]+/)+[\w-]+\.(?:py|md)\b|(?<=`)[\w-]+\.(?:py|md)(?=[`:])|(?<=`)(?:[\w-]+/)+(?=`)"
)
MODULE = re.compile(r"(?<![\w./-])choros(?:\.[a-z]\w*)+(?![\w/-])")
#: Names of users' own files in examples.
OTHERS = {"train.py"}
#: File names that look like modules.
NOT_MODULES = {"choros.json", "choros.png"}

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "compat")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(path for f in FOLDERS for path in sorted((ROOT / f).rglob("*.md")))]
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
FILES = [f"/{path.relative_to(ROOT)}" for path in (*SOURCES, *DOCUMENTS)]
ALL_FOLDERS = {f"{path.rpartition('/')[0]}/" for path in FILES}


def prose(path: Path) -> str:
    """The prose of a file: a document, or comments and docstrings."""
    text = path.read_text()
    return text if path.suffix == ".md" else "\n".join(_comments_and_docstrings(text))


def _comments_and_docstrings(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def exists(cited: str) -> bool:
    if cited.endswith("/"):
        return any(folder.endswith(f"/{cited}") or f"/{cited}" in folder for folder in ALL_FOLDERS)
    return cited in OTHERS or any(file.endswith(f"/{cited}") for file in FILES)


def is_known(module: str) -> bool:
    """Whether a module of that name exists, or a module that defines the next part of the name."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT / "src" / Path(*parts[:end])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return end == len(parts) or re.search(rf"\b{parts[end]}\b", file.read_text()) is not None
    return False


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_cited_classes_are_defined_in_their_modules(path: Path) -> None:
    for module, name in re.findall(r"`([\w/]+\.py): (\w+)`", path.read_text()):
        assert re.search(rf"^class {name}\b", (ROOT / "src" / "choros" / module).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_cited_paths_and_modules_exist(path: Path) -> None:
    text = prose(path)
    assert [cited for cited in PATH.findall(text) if not exists(cited)] == []
    assert [cited for cited in MODULE.findall(text) if cited not in NOT_MODULES and not is_known(cited)] == []
