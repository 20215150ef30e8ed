"""A call of one of Keras' methods, as a user has made it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

__all__ = ["Call"]


@final
class Call:
    """A call of one of Keras' methods, which can be made with other arguments.

    Example:
        >>> call = Call(lambda x, batch_size=32: (x, batch_size), (1,), {})
        >>> call["batch_size"], call.replaced(x=2).run()
        (32, (2, 32))
    """

    def __init__(self, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._method = method
        self._bound = inspect.signature(method).bind(*args, **kwargs)
        self._bound.apply_defaults()

    def __getitem__(self, name: str) -> Any:
        return self._bound.arguments[name]

    def get(self, name: str) -> Any:
        """``None`` for what the method does not take."""
        return self._bound.arguments.get(name)

    def replaced(self, **arguments: Any) -> Call:
        """The same call with other ``arguments``."""
        call = Call(self._method, self._bound.args, self._bound.kwargs)
        call._bound.arguments.update(arguments)
        return call

    def run(self) -> Any:
        """Makes the call."""
        return self._method(*self._bound.args, **self._bound.kwargs)
