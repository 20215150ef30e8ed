"""Class names are unique: a name has one meaning in all of choros."""

import ast
from collections import defaultdict

from harness import ROOT


def test_a_class_name_is_used_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT / "src")))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice
