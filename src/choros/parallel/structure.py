"""Nested structures: tuples, lists and dicts, such as the elements of data sets and the results of functions."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """Returns ``structure`` with ``function`` applied to its leaves: all but tuples, lists, dicts and ``None``.

    >>> map_structure(lambda number: number + 1, {"a": (1, None), "b": [2]})
    {'a': (2, None), 'b': [3]}
    """
    if structure is None:
        return None
    if isinstance(structure, dict):
        kind = OrderedDict if isinstance(structure, OrderedDict) else dict  # other classes may not accept items
        return kind((key, map_structure(function, value)) for key, value in structure.items())
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_structure(function, value) for value in structure))
    if isinstance(structure, (tuple, list)):
        return type(structure)(map_structure(function, value) for value in structure)
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """Returns the leaves of ``structure``, in the order of ``map_structure``.

    >>> leaves({"a": (1, None), "b": [2]})
    [1, 2]
    """
    found: list[Any] = []
    map_structure(found.append, structure)
    return found


def with_items(values: Sequence[Any], indices: Iterable[int], items: Sequence[Any]) -> list[Any]:
    """Returns ``values`` with these ``items`` at the ``indices``.

    >>> with_items("abc", [2, 0], "xy")
    ['y', 'b', 'x']
    """
    new = dict(zip(indices, items, strict=True))
    return [new.get(index, value) for index, value in enumerate(values)]
