"""Links of the repository's documents lead to files, and to headings, that are there."""

import re
import tomllib

import pages
import pytest

from harness import ROOT

PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "compat/**/*.md", "deploy/**/*.md")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))
#: Addresses of a site and a package that are not published: neither is there.
UNPUBLISHED = ("choros.readthedocs.io", "pypi.org/project/choros")
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def prose(text: str) -> str:
    return "".join(line for is_code, line in pages._lines(text) if not is_code)


def headings(text: str) -> set[str]:
    """The anchors of a document: its headings in lower case, without punctuation, with hyphens for spaces."""
    found = re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def dead_links(document: str, text: str) -> list[str]:
    folder, dead = (ROOT / document).parent, []
    for link in (first or second for first, second in _LINK.findall(prose(text))):
        if re.match(r"[a-z]+:", link):
            dead += [link] if any(address in link for address in UNPUBLISHED) else []
            continue
        path, _, anchor = link.partition("#")
        target = folder / path
        own = text if path == "" else target.read_text() if target.suffix == ".md" and target.is_file() else None
        if not (path == "" or target.exists()) or (anchor and own is not None and anchor not in headings(own)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert dead_links(document, (ROOT / document).read_text()) == []


def test_what_a_dead_link_is() -> None:
    text = "# A b: c\n[1](README.md) [2](none.md) [3](#a-b-c) [4](#d) [5](https://pypi.org/project/choros/)\n"
    assert dead_links("x.md", text + "```\n[7](none.md)\n```\n") == [
        "none.md",
        "#d",
        "https://pypi.org/project/choros/",
    ]


def test_the_package_links_to_what_is_published() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [url for url in project.get("urls", {}).values() if any(address in url for address in UNPUBLISHED)] == []
