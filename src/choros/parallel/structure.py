"""Structures of values: tuples, lists and dicts, as data sets yield and functions return them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["leaves", "map_structure"]


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """``structure`` with ``function`` applied to all that is not a tuple, list or dict; ``None`` stays.

    Example:
        >>> map_structure(lambda number: number + 1, {"a": (1, None), "b": [2]})
        {'a': (2, None), 'b': [3]}
    """
    if structure is None:
        return None
    if isinstance(structure, dict):
        kind = OrderedDict if isinstance(structure, OrderedDict) else dict  # others may not be made from items
        return kind((key, map_structure(function, value)) for key, value in structure.items())
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_structure(function, value) for value in structure))
    if isinstance(structure, (tuple, list)):
        return type(structure)(map_structure(function, value) for value in structure)
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """What ``map_structure`` applies a function to, in its order.

    Example:
        >>> leaves({"a": (1, None), "b": [2]})
        [1, 2]
    """
    found: list[Any] = []
    map_structure(found.append, structure)
    return found
