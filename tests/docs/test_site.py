"""The documentation's site: where its pages are. ``make docs`` builds it; ``test_links.py`` follows links."""

import re

import drawings
import durations_page
import names
import pages
import pytest

from choros.durations import table
from harness import ROOT


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("docs/torch.md", "torch.md"),
        ("docs/index.md", "index.md"),
        ("examples/README.md", "examples/README.md"),
        ("examples/mnist_torch.py", "examples/mnist_torch.py.md"),
        ("benchmarks/scaling.png", "benchmarks/scaling.png"),
    ],
)
def test_where_a_file_is(file: str, page: str) -> None:
    assert pages.page_of(file) == page


def test_links_between_documents_become_links_between_pages() -> None:
    text = (
        "[a](training.md#data) [b](../examples/README.md) [c](#here) [d](https://e.org)\n```\n[e](training.md)\n```\n"
    )
    changed = (
        "[a](training.md#data) [b](examples/README.md) [c](#here) [d](https://e.org)\n```\n[e](training.md)\n```\n"
    )
    assert pages.with_page_links("docs/torch.md", text) == changed
    assert pages.with_page_links("examples/README.md", "[s](mnist_torch.py) [t](../docs/torch.md)") == (
        "[s](mnist_torch.py.md) [t](../torch.md)"
    )


def test_what_documents_link_to_is_on_the_site() -> None:
    found = pages.outside(["docs/torch.md"])
    assert "examples/mnist_torch.py" in found
    assert not [file for file in found if file.startswith("docs/")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two:\n- a\n  more\n\n  still a\n- b\nafter\n", "Two:\n\n- a\n    more\n\n    still a\n- b\nafter\n"),
        (
            "- a\n\n  ```python\n  f()\n  ```\n\n  still a\n\nb\n",
            "- a\n\n    ```python\n    f()\n    ```\n\n    still a\n\nb\n",
        ),
        ("1. a\n   more\n", "1. a\n    more\n"),
        ("a\n\n    code\n- b\n", "a\n\n    code\n\n- b\n"),
        ("```\n- no list\n  x\n```\n", "```\n- no list\n  x\n```\n"),
    ],
)
def test_lists(text: str, expected: str) -> None:
    assert pages.python_markdown(text) == expected


def test_every_page_has_a_place_in_the_navigation() -> None:
    nav = ["index.md", {"Guides": ["torch.md", "examples/"]}, {"Reference": ["reference/"]}]
    found = [
        "index.md",
        "examples/x.md",
        "examples/README.md",
        "new.md",
        "torch.md",
        "reference/b.c.md",
        "reference/b.md",
    ]
    assert pages.complete_nav(nav, found) == [
        "index.md",
        {"Guides": ["torch.md", "examples/README.md", "examples/x.md"]},
        {"Reference": ["reference/b.md", "reference/b.c.md"]},
        {"More": ["new.md"]},
    ]


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe", reason="make docs installs it")
    from docstrings import markdown

    assert (
        markdown("Two ways::\n\n    f(x)\n\nExample:\n    >>> f(1)")
        == "Two ways:\n\n    f(x)\n\nExamples:\n    >>> f(1)"
    )
    assert markdown("Text.\n\n::\n\n    code") == "Text.\n\n\n    code"
    assert markdown("A.\n\n==== ===\na    b\n==== ===\n") == "A.\n\n```text\n==== ===\na    b\n==== ===\n```"


def test_drawings_say_how_wide_they_are() -> None:
    code = "<pre><span></span><code>a ─► b\n<span>&lt;c&gt;</span> d e f\n</code></pre></div>"
    block = '<p>x</p><div class="highlight"{}>' + code
    assert drawings.with_columns(block.format("")) == block.format(' style="--columns: 9"')


def test_a_row_for_each_name() -> None:
    table = {
        "signatures": {"A": "", "A.run": "", "A.stop": "", "f": "x", "g": "", "Old": "", "Old.run": ""},
        "values": {"A.size": "any", "A.a": "any", "A.b": "any"},
        "absent": {"Old": "dropped", "A.a": "dropped", "A.b": "dropped"},
        "different": {"A.stop": "waits"},
        "notes": {"g": "has no effect"},
    }
    assert list(names.rows(table)) == [
        "| `A`, `.run`, `.size` | the same | |",
        "| `A.a`, `.b` | absent | dropped |",
        "| `A.stop` | different | waits |",
        "| `f` | the same | |",
        "| `g` | the same | has no effect |",
        "| `Old` | absent | dropped |",
    ]


@pytest.mark.parametrize("page", names.FOLDERS)
def test_tables_of_names(page: str) -> None:
    text = names.name_tables(page)
    assert text.count("\n## ") == len(list((ROOT / "tests" / names.FOLDERS[page]).glob("*.toml")))
    assert names.name_tables("torch.md") == ""


def test_waiting_has_a_row_for_each_duration() -> None:
    text = durations_page.duration_tables("waiting.md")
    assert [line.split("`")[1] for line in text.splitlines() if "`" in line] == list(table())
    assert "| 60 s | for a rank whose script has ended, but not its process | a report says so | `LINGER` |" in text
    assert durations_page.duration_tables("torch.md") == ""


def test_no_module_has_a_duration_of_its_own() -> None:
    own = re.compile(r"^_?(?:[A-Z_]*_)?(?:SECONDS|GRACE|PAUSE)\b[^=\n]*= *[0-9]", re.MULTILINE)
    found = {str(path): own.findall(path.read_text()) for path in (ROOT / "src").rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}
