"""What docstrings are written in, for mkdocstrings.

A paragraph that ends with ``::`` announces code, a table is between lines of ``===``, ``Example:`` is a section.
That of ``choros.run`` is made from the rows of chorosrun's flags: it is imported, not read.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

from choros.launch.run import run

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
            text = obj.docstring.value
            if isinstance(obj, griffe.Function) and obj.path == "choros.launch.run.run":  # made from rows
                text = inspect.getdoc(run)
                obj.parameters = griffe.Parameters(*map(_parameter, inspect.signature(run).parameters.values()))
            obj.docstring.value = markdown(text or "")


def _parameter(of: inspect.Parameter) -> griffe.Parameter:
    kind = griffe.ParameterKind(of.kind.description)
    default = None if of.default is of.empty else repr(of.default)
    return griffe.Parameter(of.name, annotation=inspect.formatannotation(of.annotation), kind=kind, default=default)
