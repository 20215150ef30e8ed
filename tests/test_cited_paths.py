"""Files, folders and modules that docstrings, comments and documents name exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from harness import ROOT

#: A path with a folder, anywhere; a file or folder alone, in backticks. A colon and a class may follow.
PATH = re.compile(
    r"(?<![\w/.~$<-])(?:[\w-]+/)+[\w-]+\.(?:py|md)\b|(?<=`)[\w-]+\.(?:py|md)(?=[`:])|(?<=`)(?:[\w-]+/)+(?=`)"
)
#: A comment that has a match of either: reading all tokens of all files takes seconds.
CITES = re.compile(r"#.*(?:\.py|\.md|/`|choros\.)")
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
    """The prose of a file: a document without its diffs, which name files to be, or comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"^```diff\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(_comments_and_docstrings(text))


def _comments_and_docstrings(source: str) -> Iterator[str]:
    if CITES.search(source):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


@cache
def exists(cited: str) -> bool:
    if cited.endswith("/"):
        return any(folder.endswith(f"/{cited}") or f"/{cited}" in folder for folder in ALL_FOLDERS)
    return cited in OTHERS or any(file.endswith(f"/{cited}") for file in FILES)


@cache
def is_known(module: str) -> bool:
    """Whether a module of that name exists, or a module that defines the next part of the name."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT / "src" / Path(*parts[:end])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return end == len(parts) or re.search(rf"\b{parts[end]}\b", file.read_text()) is not None
    return False


def problems(path: Path) -> Iterator[str]:
    """What a file cites that does not exist."""
    name, text = path.relative_to(ROOT), prose(path)
    yield from (f"{name}: {cited}" for cited in PATH.findall(text) if not exists(cited))
    yield from (
        f"{name}: {cited}" for cited in MODULE.findall(text) if cited not in NOT_MODULES and not is_known(cited)
    )
    if path.suffix == ".md":
        for module, cited in re.findall(r"`([\w/]+\.py): (\w+)`", text):
            if not re.search(rf"^class {cited}\b", (ROOT / "src" / "choros" / module).read_text(), re.MULTILINE):
                yield f"{name}: {module} has no class {cited}"


def test_what_prose_cites_exists() -> None:
    assert [problem for path in (*SOURCES, *DOCUMENTS) for problem in problems(path)] == []


def test_what_does_not_exist_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "src" / "choros").mkdir(parents=True)
    (tmp_path / "src" / "choros" / "errors.py").write_text("class Real: ...\n")
    page = tmp_path / "page.md"
    page.write_text("`errors.py: Real`, `errors.py: Unreal`, `nowhere/at_all.py`, choros.nothing and choros.errors\n")
    assert list(problems(page)) == [
        "page.md: nowhere/at_all.py",
        "page.md: choros.nothing",
        "page.md: errors.py has no class Unreal",
    ]
