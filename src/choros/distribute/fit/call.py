"""The user's call of one of Keras' methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

__all__ = ["KerasCall"]


@final
class KerasCall:
    """A call of one of Keras' methods, whose arguments can be replaced before it is run.

    Example:
        >>> call = KerasCall(lambda x, batch_size=32: (x, batch_size), (1,), {})
        >>> call["batch_size"], call.replaced(x=2).run()
        (32, (2, 32))
    """

    def __init__(self, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._method = method
        self._bound = inspect.signature(method).bind(*args, **kwargs)
        self._bound.apply_defaults()

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return self._bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self._bound.kwargs

    def __getitem__(self, name: str) -> Any:
        return self._bound.arguments[name]

    def get(self, name: str) -> Any:
        """Returns an argument; ``None`` if the method does not have it."""
        return self._bound.arguments.get(name)

    def replaced(self, **arguments: Any) -> KerasCall:
        """Returns the same call with other ``arguments``."""
        call = KerasCall(self._method, self._bound.args, self._bound.kwargs)
        call._bound.arguments.update(arguments)
        return call

    def run(self) -> Any:
        """Calls the method."""
        return self._method(*self._bound.args, **self._bound.kwargs)
