"""The page in a real browser."""

import pytest

from choros.report.page import comparison_of, differences, page_of, write_page
from report.browser import CHROMIUM, browser
from report.records import read, record_of

#: Words of drawings that leave their drawing, and elements that are wider than the screen, but in what scrolls.
CLIPPED = """
[...document.querySelectorAll("svg text")].filter(text => {
  const word = text.getBoundingClientRect(), drawing = text.closest("svg").getBoundingClientRect();
  return word.left < drawing.left - 1 || word.right > drawing.right + 1 || word.bottom > drawing.bottom + 1;
}).map(text => text.textContent)
"""
WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
SMALLEST = "Math.min(...[...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height))"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)")
def test_no_text_is_clipped(tmp_path):
    jobs = {str(ranks): read(record_of(ranks)) for ranks in (1, 4, 64)}
    jobs["long"] = read(record_of(2, seconds=9000, step=2.5))
    for name, job in jobs.items():
        write_page(tmp_path / f"{name}.html", page_of(job))
    pair = jobs["4"], jobs["long"]
    write_page(tmp_path / "two.html", comparison_of(pair, ("before", "after"), differences(*pair)))
    with browser() as shown:
        for file in sorted(tmp_path.iterdir()):
            for width in (390, 1280):
                shown.show(file, width)
                content, screen = shown.value(WIDTHS)
                assert content <= screen, (file.name, width)
                assert shown.value(CLIPPED) == [], (file.name, width)
                assert shown.value(SMALLEST) >= 10, (file.name, width)
        assert {each.partition(":")[0] for each in shown.requested} == {"file"}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)")
def test_a_page_is_dark_where_the_reader_wants_it(tmp_path):
    write_page(tmp_path / "run.html", page_of(read(record_of(2))))
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser() as shown:
        for medium, scheme, colour in [
            ("screen", "light", "rgb(255, 255, 255)"),
            ("screen", "dark", "rgb(20, 23, 28)"),
            ("print", "dark", "rgb(255, 255, 255)"),
        ]:
            shown.show(tmp_path / "run.html", 390, scheme=scheme, medium=medium)
            assert shown.value(ground) == colour
