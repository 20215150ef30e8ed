"""What is changed in other libraries: attributes as long as a block runs; classes of objects, by subclasses."""

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


_derived: dict[tuple[type, type], type] = {}


def derived(base: type, behaviour: type) -> type:
    """The subclass of ``base``, overridden by the mixin ``behaviour``, of the same name; created only once."""
    kind = _derived.get((base, behaviour))
    if kind is None:
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        kind = _derived[base, behaviour] = type(base.__name__, (behaviour, base), namespace)
    return kind


def own_class(changed: Any) -> Any:
    """The class that an object had before it was ``derived`` the last time."""
    return type(changed).__bases__[1]


def underived(kind: type) -> type:
    """The class of which ``derived`` has made ``kind``; any other class itself."""
    while kind in _derived.values():
        kind = kind.__bases__[1]
    return kind
