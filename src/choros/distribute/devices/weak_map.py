"""A dictionary with weak keys that are compared by identity."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, final

__all__ = ["WeakMap"]

V = TypeVar("V")


@final
class WeakMap(Generic[V]):
    """A weak-key dictionary by identity, for keys that redefine equality, as Keras variables do.

    Example:
        >>> class Owner: ...
        >>> owner, known = Owner(), WeakMap()
        >>> known[owner] = 1
        >>> known.get(owner), known.get(Owner())
        (1, None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: Any) -> V | None:
        """Returns the value of ``key``; ``None`` if there is none."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def __setitem__(self, key: Any, value: V) -> None:
        number = id(key)
        self._entries[number] = (weakref.ref(key, lambda _: self._entries.pop(number, None)), value)
