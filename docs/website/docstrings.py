"""What docstrings are written in, for mkdocstrings.

A paragraph that ends with ``::`` announces code, a table is between lines of ``===``, ``Example:`` is a section.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = r"=+(?: +=+)+\n"
_TABLE = re.compile(rf"^{_LINE}(?:.+\n)+?{_LINE}(?:(?:.+\n)+?{_LINE})?", re.MULTILINE)


def markdown(docstring: str) -> str:
    """Returns a docstring with the marks that Markdown and Google's style know.

    >>> markdown("Two ways::\\n\\n    f(x)\\n\\nExample:\\n    >>> f(1)")
    'Two ways:\\n\\n    f(x)\\n\\nExamples:\\n    >>> f(1)'
    """
    text = re.sub(r"^::\n|(?<=:):$", "", docstring, flags=re.MULTILINE)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return _TABLE.sub(r"```text\n\g<0>```\n", text + "\n").rstrip("\n")


class Docstrings(griffe.Extension):
    """Changes docstrings to Markdown as they are read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object that has been read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
