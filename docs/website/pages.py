"""Which page of the site a file of the repository is.

::

    docs/torch.md              torch.md
    examples/README.md         examples/README.md
    examples/mnist_torch.py    examples/mnist_torch.py.md

Documents link to files of the repository by relative paths; those that are not below ``docs`` are added to the site.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Of files whose source is shown.
_LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^ *(```+)")
_ITEM = re.compile(r"([-*]|\d+\.) +(?=\S)")


def page_of(file: str) -> str:
    """Returns the page of a file of the repository, as a path below the site's sources."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return f"{file}.md" if is_source(file) else file


def is_source(file: str) -> bool:
    """Whether a file's page shows its source; other files are on the site as they are."""
    return os.path.splitext(file)[1] in _LANGUAGES


def linked_files(file: str, text: str) -> list[str]:
    """Returns the files of the repository that a document links to by relative paths."""
    found: list[str] = []

    def note(target: str) -> str:
        found.append(target)
        return target

    _with_links(file, text, note)
    return found


def with_page_links(file: str, text: str) -> str:
    """Returns the text of a document, in which links to files are links to their pages."""
    here = posixpath.dirname(page_of(file))
    return _with_links(file, text, lambda target: posixpath.relpath(page_of(target), here or "."))


def _with_links(file: str, text: str, change: Callable[[str], str]) -> str:
    folder = posixpath.dirname(file)

    def changed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return change(target) + (link[2] or "") if (ROOT / target).is_file() else link[0]

    return "".join(line if is_code else _LINK.sub(changed, line) for is_code, line in _lines(text))


def _lines(text: str) -> Iterator[tuple[bool, str]]:
    """The lines of a document, and whether each is code."""
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            yield True, line
            if mark and mark[1] == fence:
                fence = ""
        else:
            fence = mark[1] if mark else ""
            yield bool(mark), line


def outside(start: Iterable[str]) -> set[str]:
    """Returns the files outside of ``docs`` to which documents link, directly or from one to the next."""
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        file = waiting.pop()
        if file.endswith(".md"):
            linked = set(linked_files(file, (ROOT / file).read_text()))
            new = {target for target in linked - found if not target.startswith("docs/")}
            found |= new
            waiting += new
    return found


def source_page(file: str) -> str:
    """Returns the page of a file that is not a document."""
    language = _LANGUAGES[os.path.splitext(file)[1]]
    return f"# {file}\n\n````{language}\n{(ROOT / file).read_text()}\n````\n"


def python_markdown(text: str) -> str:
    """Returns a document for Python-Markdown: an empty line before a list, and four columns for what is in an item.

    >>> python_markdown("Two:\\n- a\\n  more of a\\n\\n  still a\\n- b\\n")
    'Two:\\n\\n- a\\n    more of a\\n\\n    still a\\n- b\\n'
    """
    lines: list[str] = []
    width = 0  # of the mark of the item
    for is_code, line in _lines(text):
        item = None if is_code else _ITEM.match(line)
        if item:
            if not width and lines and lines[-1].strip():
                lines.append("\n")
            width = item.end()
        elif line.strip() and not line.startswith(" " * max(width, 1)):
            width = 0 if is_code or not lines or not lines[-1].strip() else width
        elif width and line.strip():
            line = " " * (4 - width) + line
        lines.append(line)
    return "".join(lines)


Nav = list[Any]  # as in mkdocs.yml: pages, or {title: a page or a Nav}


def complete_nav(nav: Nav, pages: Iterable[str]) -> Nav:
    """Returns the navigation with all pages: those of a folder where it is named, the rest as "More" at the end."""
    left = list(pages)

    def place(item: Any) -> Nav:
        if isinstance(item, dict):
            return [
                {title: [new for old in below for new in place(old)] if isinstance(below, list) else place(below)[0]}
                for title, below in item.items()
            ]
        found = sorted((page for page in left if page.startswith(item)), key=_order) if item.endswith("/") else [item]
        left[:] = [page for page in left if page not in found]
        return found

    placed = [new for item in nav for new in place(item)]
    return placed + ([{"More": left}] if left else [])


def _order(page: str) -> tuple[bool, str]:
    return not page.endswith(("index.md", "README.md")), page.removesuffix(".md")
