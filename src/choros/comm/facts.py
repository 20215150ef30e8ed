"""Facts: values on which ranks have agreed by chance, such as seeds. A new rank of an elastic job is told the same.

::

    rank 0, 1, 2     known("seed", draw) ──► 17      known("seed", draw) ──► 4      facts() = {"seed": [17, 4]}
    a new rank       known("seed", draw) ──► 17      known("seed", draw) ──► 4      the script makes the same calls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["Facts", "facts", "known", "learn_facts"]

T = TypeVar("T")
#: By name, the values in the order of the calls.
Facts = Mapping[str, list[object]]

_facts: dict[str, list[object]] = {}
_told: Facts = {}


def known(name: str, draw: Callable[[], T]) -> T:
    """Returns what ``draw`` returns; in a new rank, what it has returned on the others, in the call of this number.

    Args:
        name: what the value is.
        draw: returns the same value on all ranks, one that can be pickled and compared.

    Example:
        >>> known("answer", lambda: 42)
        42
    """
    values = _facts.setdefault(name, [])
    earlier = _told.get(name, [])
    value = earlier[len(values)] if len(values) < len(earlier) else draw()
    values.append(value)
    return value  # type: ignore[return-value]


def facts() -> Facts:
    """Returns all values so far: a view that grows."""
    return _facts


def learn_facts(told: Facts) -> None:
    """Makes ``told`` what ``known`` returns."""
    global _told
    _told = told
