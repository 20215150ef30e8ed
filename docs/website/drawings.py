"""Drawings in text: how many columns each has, from which the site's style sheet computes a size that fits the page."""

from __future__ import annotations

import html
import re

_BLOCK = re.compile(r'(<div class="[^"]*highlight)(">)(<pre>.*?</pre>)', re.DOTALL)
_TAG = re.compile(r"<[^>]+>")


def with_columns(page: str) -> str:
    """Returns the HTML of a page, in which each block of code has the number of its columns.

    >>> with_columns('<div class="highlight"><pre><code>a ─► b\\n</code></pre></div>')
    '<div class="highlight" style="--columns: 6"><pre><code>a ─► b\\n</code></pre></div>'
    """

    def sized(block: re.Match[str]) -> str:
        lines = html.unescape(_TAG.sub("", block[3])).splitlines()
        return f'{block[1]}" style="--columns: {max(map(len, lines), default=0)}">{block[3]}'

    return _BLOCK.sub(sized, page)
