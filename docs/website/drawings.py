"""Drawings in text: on the site they are pictures, made of the text's own characters.

A block of code without a language that has arrows or corners is a drawing. Its lines and arrows become paths, all else
becomes text at the same place; the style sheet gives the colours of the page, light or dark. Of other blocks of code
the style sheet learns how many columns they have, and computes a size that fits the page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

_BLOCK = re.compile(r'(<div class="[^"]*highlight)(">)(<pre>.*?</pre>)', re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_FENCE = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: The directions in which a character's lines go from the middle of its cell: left, right, up, down.
_LINES = {"─": "lr", "│": "ud", "┌": "rd", "┐": "ld", "└": "ru", "┘": "lu"}
_LINES |= {"├": "rud", "┤": "lud", "┬": "lrd", "┴": "lru", "┼": "lrud"}
#: The corners of an arrow's head, in parts of its cell; the line behind it ends where it begins.
_HEADS = {
    "►": ("l", ((0.1, 0.22), (1, 0.5), (0.1, 0.78))),
    "◄": ("r", ((0.9, 0.22), (0, 0.5), (0.9, 0.78))),
    "▼": ("u", ((-0.1, 0.5), (0.5, 1), (1.1, 0.5))),
    "▲": ("d", ((-0.1, 0.5), (0.5, 0), (1.1, 0.5))),
}
_WIDTH, _HEIGHT = 8.4, 18.0
_WORDS = re.compile(r"[^ ]+(?: [^ ]+)*")


def with_columns(page: str) -> str:
    """Returns the HTML of a page, in which each block of code has the number of its columns.

    >>> with_columns('<div class="highlight"><pre><code>a ─► b\\n</code></pre></div>')
    '<div class="highlight" style="--columns: 6"><pre><code>a ─► b\\n</code></pre></div>'
    """

    def sized(block: re.Match[str]) -> str:
        lines = html.unescape(_TAG.sub("", block[3])).splitlines()
        return f'{block[1]}" style="--columns: {max(map(len, lines), default=0)}">{block[3]}'

    return _BLOCK.sub(sized, page)


def with_pictures(markdown: str) -> str:
    """Returns a document in which drawings are pictures.

    >>> with_pictures("```\\na ─► b\\n```").startswith('<div class="drawing"><svg')
    True
    >>> with_pictures("```\\n$ ls\\n```")
    '```\\n$ ls\\n```'
    """

    def drawn(block: re.Match[str]) -> str:
        is_drawing = any(each in block[1] for each in (*_HEADS, "┌", "└", "├"))
        return f'<div class="drawing">{picture(block[1])}</div>' if is_drawing else block[0]

    return _FENCE.sub(drawn, markdown)


def picture(text: str) -> str:
    """The drawing as SVG, in one line.

    >>> print(picture("a ─► b").replace("><", ">\\n<"))
    <svg role="img" aria-label="drawing" viewBox="0 0 50 18" style="max-width: 50px">
    <path d="M16.8 9H25.2"/>
    <path class="head" d="M26 4L33.6 9L26 14z"/>
    <text x="0" y="13" textLength="8.4">a</text>
    <text x="42" y="13" textLength="8.4">b</text>
    </svg>
    """
    rows = text.rstrip("\n").split("\n")
    columns = max(map(len, rows))
    cells = [row.ljust(columns) for row in rows]
    width, height = round(columns * _WIDTH), round(len(rows) * _HEIGHT)
    lines = "".join((*_horizontal(cells), *_vertical(cells)))
    parts = [f'<path d="{lines}"/>', *_heads(cells), *_texts(rows)]
    size = f'viewBox="0 0 {width} {height}" style="max-width: {width}px"'
    return f'<svg role="img" aria-label="drawing" {size}>{"".join(parts)}</svg>'


def _horizontal(cells: Sequence[str]) -> Iterator[str]:
    for number, row in enumerate(cells):
        sides = [_sides(each) for each in row]
        for start, end in _runs([("l" in each, "r" in each) for each in sides]):
            yield f"M{_n(start * _WIDTH / 2)} {_n((number + 0.5) * _HEIGHT)}H{_n(end * _WIDTH / 2)}"


def _vertical(cells: Sequence[str]) -> Iterator[str]:
    for number, column in enumerate(map("".join, zip(*cells, strict=True))):
        sides = [_sides(each) for each in column]
        for start, end in _runs([("u" in each, "d" in each) for each in sides]):
            yield f"M{_n((number + 0.5) * _WIDTH)} {_n(start * _HEIGHT / 2)}V{_n(end * _HEIGHT / 2)}"


def _sides(character: str) -> str:
    return _LINES.get(character, _HEADS.get(character, ("",))[0] if character in "▼▲" else "")


def _runs(halves: Sequence[tuple[bool, bool]]) -> Iterator[tuple[int, int]]:
    """From whether each half of the cells of a line is drawn, the beginnings and ends of lines in halves of cells."""
    start = None
    flat = [half for cell in halves for half in cell]
    for position, is_drawn in enumerate([*flat, False]):
        if is_drawn and start is None:
            start = position
        elif not is_drawn and start is not None:
            yield start, position
            start = None


def _heads(cells: Sequence[str]) -> Iterator[str]:
    for number, row in enumerate(cells):
        for column, character in enumerate(row):
            if character in _HEADS:
                corners = ((column + x, number + y) for x, y in _HEADS[character][1])
                path = "L".join(f"{_n(x * _WIDTH)} {_n(y * _HEIGHT)}" for x, y in corners)
                yield f'<path class="head" d="M{path}z"/>'


def _texts(rows: Sequence[str]) -> Iterator[str]:
    lines = str.maketrans(dict.fromkeys((*_LINES, *_HEADS), " "))
    for number, row in enumerate(rows):
        for words in _WORDS.finditer(row.translate(lines)):
            place = f'x="{_n(words.start() * _WIDTH)}" y="{_n((number + 0.72) * _HEIGHT)}"'
            yield f'<text {place} textLength="{_n(len(words[0]) * _WIDTH)}">{html.escape(words[0])}</text>'


def _n(number: float) -> str:
    """A coordinate, rounded."""
    return f"{number:.1f}".removesuffix(".0")
