"""The pages of the API reference: one for each public module, found by reading the sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import griffe
from pages import ROOT

#: What users import beside ``choros`` itself: see the layers of pyproject.toml.
FACES = ("keras", "torch", "tensorflow", "jax", "distribute")


@dataclass(frozen=True)
class PublicModule:
    """A module, and its public names that are not modules."""

    name: str
    members: tuple[str, ...]

    @property
    def page(self) -> str:
        """The page, as a path below the site's sources."""
        return f"reference/{self.name}.md"

    @property
    def text(self) -> str:
        """The page's text, which mkdocstrings replaces by the docstrings."""
        members = "\n".join(f"        - {member}" for member in self.members)
        return f"# {self.name}\n\n::: {self.name}\n    options:\n      members:\n{members}\n"

    def missing(self, html: str) -> list[str]:
        """Returns the names that are not on the page."""
        return [member for member in self.members if f'id="{self.name}.{member}"' not in html]


@cache
def public_modules() -> tuple[PublicModule, ...]:
    """Returns the public modules of choros, without importing any."""
    package = griffe.load("choros", search_paths=[str(ROOT / "src")], allow_inspection=False, resolve_aliases=True)
    faces = (package[face] for face in FACES if face in package.members)
    return tuple(module for start in (package, *faces) for module in _public_modules(start.path, start))


def module_list() -> str:
    """Returns links to the pages, for the first page of the reference."""
    return "\n" + "".join(f"- [`{module.name}`]({module.name}.md)\n" for module in public_modules())


def _public_modules(name: str, module: griffe.Object | griffe.Alias) -> Iterator[PublicModule]:
    """A module, and those among its public names."""
    members = {str(public): module.members.get(str(public)) for public in module.exports or ()}
    targets = {public: each.final_target if each and each.is_alias else each for public, each in members.items()}
    modules = {public: each for public, each in targets.items() if each and each.is_module}
    yield PublicModule(
        name, tuple(public for public in members if public not in modules and not public.startswith("__"))
    )
    for public, each in modules.items():
        yield from _public_modules(f"{name}.{public}", each)
