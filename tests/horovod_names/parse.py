"""Writes the table of a Horovod API's public names, from Horovod's sources, which need not be installed::

    pip download horovod==0.28.1 --no-deps --no-binary :all: && tar xzf horovod-0.28.1.tar.gz
    python tests/horovod_names/parse.py horovod-0.28.1 horovod.torch choros.torch > tests/horovod_names/torch.toml

Entries under ``[absent]`` are written by hand, and kept by hand when a table is made again.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The methods of these, which users call.
_BASICS = ("horovod.common.basics", "HorovodBasics")
#: Helpers that packages import for themselves.
_INTERNAL = {
    "check_extension",
    "check_num_rank_power_of_2",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "is_version_greater_equal_than",
    "num_rank_is_power_2",
    "split_list",
}
_OPERATIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


class Sources:
    """The modules below a directory, parsed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def module(self, name: str) -> ast.Module | None:
        """Returns the module or package ``name``; ``None`` if it is not below the directory."""
        path = self._root / name.replace(".", "/")
        found = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)
        return None if found is None else ast.parse(found.read_text())

    def find(self, module: str, name: str) -> Any:
        """Returns the definition of ``name`` in ``module``, through imports and assignments; ``None`` without one."""
        tree = self.module(module)
        found = None
        for node in () if tree is None else statements(tree):
            match node:
                case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                    found = node
                case ast.ImportFrom(module=str() as source):
                    for alias in node.names:
                        is_module = self.module(f"{source}.{alias.name}") is not None
                        if (alias.asname or alias.name) == name and not is_module:
                            found = self.find(source, alias.name) or found
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Attribute(attr=attribute)) if target == name:
                    found = method(self.find(*_BASICS), attribute) or found
                case _:
                    pass
        if isinstance(found, ast.FunctionDef) and ast.unparse(found.args) == "*args, **kwargs":
            found = method(self.find(*_BASICS), name)
        return found


def statements(tree: Any) -> Iterator[Any]:
    """The statements of a module, those in ``if`` and ``try`` as well."""
    for node in tree.body:
        if isinstance(node, (ast.If, ast.Try)):
            yield from statements(node)
            yield from node.orelse
        else:
            yield node


def public_names(tree: ast.Module) -> list[str]:
    """The names that a package offers, without modules that it imports for itself."""
    names = set()
    for node in statements(tree):
        match node:
            case ast.ImportFrom(module=str() as source) if source.startswith("horovod"):
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute()):
                names.add(name)
            case _:
                pass
    return sorted(name for name in names - _INTERNAL if not name.startswith("_"))


def method(kind: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """The method ``name`` of a class."""
    return next((each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def signature(function: ast.FunctionDef) -> str:
    """The parameters without annotations and ``self``; defaults as they are written."""
    arguments = function.args
    for each in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    if arguments.args and arguments.args[0].arg == "self":
        del arguments.args[0]
    return ast.unparse(arguments)


def table(sources: Sources, package: str, module: str) -> Iterator[tuple[str, str]]:
    """Pairs of names and signatures; a class has that of its constructor, and its public methods."""
    for name in public_names(sources.module(package)):
        found = sources.find(module, name) or sources.find(package, name)
        if isinstance(found, ast.FunctionDef):
            yield name, signature(found)
        elif isinstance(found, ast.ClassDef):
            constructor = method(found, "__init__")
            if constructor is not None:
                yield name, signature(constructor)
            else:
                yield name, "class"
            for each in found.body:
                if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and name == "ProcessSet":
                    yield f"{name}.{each.name}", signature(each)
        else:
            yield name, "value"


def main(root: str, package: str, face: str) -> None:
    """Prints the table."""
    sources = Sources(Path(root))
    pairs = list(table(sources, package, package))
    print(f"# The public names of {package} in Horovod 0.28.1, by parse.py. Defaults are source text.")
    print(f'face = "{face}"')
    print("\n[signatures]")
    for name, text in pairs:
        if text not in ("value", "class"):
            print(f'"{name}" = "{text}"' if "." in name else f'{name} = "{text}"')
    print("\n[values]")
    for name, text in pairs:
        if text in ("value", "class"):
            print(f"{name} = {_OPERATIONS.index(name)}" if name in _OPERATIONS else f'{name} = "any"')
    print("\n[absent]")


if __name__ == "__main__":
    main(*sys.argv[1:])
