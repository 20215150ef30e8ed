"""Attributes of other libraries' modules, classes and objects, replaced as long as a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, /, **values: Any) -> Iterator[None]:
    """A block in which ``owner`` has these attributes; those of objects are set past Keras' tracking of attributes.

    >>> import math
    >>> with replaced(math, pi=3):
    ...     math.pi
    3
    """
    own = {name: vars(owner).get(name, _MISSING) for name in values}
    _assign(owner, values)
    try:
        yield
    finally:
        _assign(owner, own)


def _assign(owner: Any, values: dict[str, Any]) -> None:
    plain = isinstance(owner, (type, ModuleType))
    for name, value in values.items():
        if value is _MISSING:
            (delattr if plain else object.__delattr__)(owner, name)
        else:
            (setattr if plain else object.__setattr__)(owner, name, value)
