"""The source grows only with a reason."""

from pathlib import Path

from harness import ROOT
from sizes import Sizes, limits, measure


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "top.py").write_text(
        "class A:\n    def f(self):\n        def g():\n            pass\n\n        return g\n"
    )
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "module.py").write_text("x = 1\n")
    sizes, packages = measure(tmp_path)
    assert sizes == Sizes(lines=7, files=2, classes=1, longest_file=6, longest_function=5, most_methods=1)
    assert packages == {"": (6, 1), "part": (1, 1)}


def test_each_limit_has_a_reason() -> None:
    rows = list(limits((ROOT / "CHANGELOG.md").read_text()))
    assert rows
    assert [limit for limit, reason in rows if not reason] == []


def test_the_source_is_no_larger_than_its_limits() -> None:
    *_, (limit, _) = limits((ROOT / "CHANGELOG.md").read_text())
    assert measure()[0].beyond(limit) == []
