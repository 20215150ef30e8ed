"""What is known of objects that others own, for as long as they exist."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, final

__all__ = ["WeakMap"]

V = TypeVar("V")


@final
class WeakMap(Generic[V]):
    """A dictionary by identity, whose keys may be compared in ways of their own, as Keras variables are.

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
        """What is known of ``key``."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def __setitem__(self, key: Any, value: V) -> None:
        number = id(key)
        self._entries[number] = (weakref.ref(key, lambda _: self._entries.pop(number, None)), value)
