"""The tables of public names, from the data with which the tests compare signatures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import ROOT

#: The page that shows the tables of a folder below ``tests``.
FOLDERS = {"horovod-names.md": "horovod_names", "distribute-names.md": "tf_distribute_names"}


def name_tables(page: str) -> str:
    """Returns the tables of a page, in Markdown; of other pages an empty text."""
    if page not in FOLDERS:
        return ""
    return "".join(_section(path) for path in sorted((ROOT / "tests" / FOLDERS[page]).glob("*.toml"), key=_by_length))


def _by_length(path: Path) -> tuple[int, str]:
    return path.stem.count("_"), path.stem


def _section(path: Path) -> str:
    text = path.read_text()
    content = tomllib.loads(text)
    original = content.get("original") or re.findall(r"names of ([\w.]+) in", text)[0]
    lines = [f"\n## {original}\n", f"`{content['face']}` has:\n", "| name | here | |", "|---|---|---|"]
    return "\n".join([*lines, *rows(content)]) + "\n"


def rows(table: dict[str, Any]) -> Iterator[str]:
    """Yields a row for each name, and one for those methods of a class that are compared in the same way.

    >>> list(rows({"signatures": {"A": "", "A.run": "", "f": "x"}, "values": {}, "absent": {"f": "why"}}))
    ['| `A`, `.run` | the same | |', '| `f` | absent | why |']
    """
    absent, different, notes = (table.get(section, {}) for section in ("absent", "different", "notes"))
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted({*table["signatures"], *table["values"], *absent}, key=_by_name):
        owner, dot, method = name.partition(".")
        if dot and owner in absent:
            continue
        if name in absent:
            comparison = f"absent | {absent[name]} |"
        elif name in different:
            comparison = f"different | {different[name]} |"
        else:
            note = notes.get(name) or notes.get(owner)
            comparison = f"the same | {note} |" if note else "the same | |"
        names = found.setdefault((owner, comparison), [])
        names.append(f"`.{method}`" if dot and names else f"`{name}`")
    for (_, comparison), names in found.items():
        yield f"| {', '.join(names)} | {comparison}"


def _by_name(name: str) -> tuple[str, bool, str]:
    owner, _, method = name.partition(".")
    return owner.lower(), bool(method), method
