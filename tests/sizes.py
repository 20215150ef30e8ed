"""The sizes of the source, and what they may be at most: ``make check`` prints them, and fails if one is larger.

The limits are the last row of the table "Size of the source" in CHANGELOG.md. Who needs a larger one adds a row, with
the reason; who has made the source smaller lowers them in place.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sizes:
    """Numbers of lines, files and classes; lines of the longest file and function; methods of the class with most."""

    lines: int
    files: int
    classes: int
    longest_file: int
    longest_function: int
    most_methods: int

    def beyond(self, limits: Sizes) -> list[str]:
        """What is larger than its limit.

        >>> Sizes(9, 1, 1, 9, 9, 1).beyond(Sizes(8, 1, 1, 9, 9, 1))
        ['lines: 9, at most 8']
        """
        pairs = ((each.name, getattr(self, each.name), getattr(limits, each.name)) for each in fields(self))
        return [f"{name.replace('_', ' ')}: {size}, at most {limit}" for name, size, limit in pairs if size > limit]


@dataclass(frozen=True)
class Module:
    """A file of the source: its package, and what of it is counted."""

    package: str
    lines: int
    functions: tuple[int, ...]
    methods: tuple[int, ...]

    @staticmethod
    def read(path: Path, top: Path) -> Module:
        """Counts a file below ``top``."""
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        function = (ast.FunctionDef, ast.AsyncFunctionDef)
        return Module(
            package=path.relative_to(top).parts[0] if path.parent != top else "",
            lines=text.count("\n"),
            functions=tuple((node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, function)),
            methods=tuple(
                sum(isinstance(each, function) for each in node.body)
                for node in nodes
                if isinstance(node, ast.ClassDef)
            ),
        )


def measure(top: Path = ROOT / "src" / "choros") -> tuple[Sizes, Mapping[str, tuple[int, int]]]:
    """The sizes, and the lines and files of each package."""
    modules = [Module.read(path, top) for path in sorted(top.rglob("*.py"))]
    packages: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for module in modules:
        lines, files = packages[module.package]
        packages[module.package] = lines + module.lines, files + 1
    sizes = Sizes(
        lines=sum(module.lines for module in modules),
        files=len(modules),
        classes=sum(len(module.methods) for module in modules),
        longest_file=max(module.lines for module in modules),
        longest_function=max(lines for module in modules for lines in module.functions),
        most_methods=max(number for module in modules for number in module.methods),
    )
    return sizes, packages


def limits(changelog: str) -> Iterator[tuple[Sizes, str]]:
    """The rows of the table: limits, and why they were set.

    >>> list(limits("| 8 | 1 | 1 | 9 | 9 | 1 | the first |"))
    [(Sizes(lines=8, files=1, classes=1, longest_file=9, longest_function=9, most_methods=1), 'the first')]
    """
    for line in changelog.splitlines():
        cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        numbers = cells[: len(fields(Sizes))]
        if line.startswith("| ") and len(cells) == len(numbers) + 1 and all(map(str.isdigit, numbers)):
            yield Sizes(*map(int, numbers)), cells[-1]


def main() -> int:
    """Prints the lines of each package, and what is larger than it may be."""
    sizes, packages = measure()
    for package, (lines, files) in sorted(packages.items(), key=lambda item: -item[1][0]):
        print(f"{lines:7,} lines {files:4} files  {package}")
    print(f"{sizes.lines:7,} lines {sizes.files:4} files  {sizes.classes} classes")
    *_, (limit, _) = limits((ROOT / "CHANGELOG.md").read_text())
    beyond = sizes.beyond(limit)
    for each in beyond:
        print(f"src has grown: {each} (make it smaller, or say why in CHANGELOG.md, 'Size of the source')")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
