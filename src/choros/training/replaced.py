"""Attributes of other libraries' modules, classes and objects, replaced as long as a block runs."""

from types import ModuleType
from typing import Any, final

_MISSING = object()


@final
class Replaced:
    """A block in which ``owner`` has these attributes; those of objects are set past Keras' tracking of attributes.

    >>> import math
    >>> with Replaced(math, pi=3):
    ...     math.pi
    3
    """

    def __init__(self, owner: Any, /, **values: Any) -> None:
        self._owner = owner
        self._values = values
        self._own: dict[str, Any] = {}

    def __enter__(self) -> None:
        attributes = vars(self._owner)
        self._own = {name: attributes.get(name, _MISSING) for name in self._values}
        self._assign(self._values)

    def __exit__(self, *_: object) -> None:
        self._assign(self._own)

    def _assign(self, values: dict[str, Any]) -> None:
        owner = self._owner
        plain = isinstance(owner, (type, ModuleType))
        for name, value in values.items():
            if value is _MISSING:
                (delattr if plain else object.__delattr__)(owner, name)
            else:
                (setattr if plain else object.__setattr__)(owner, name, value)
